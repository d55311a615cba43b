// Trees of several sources as one, best first by calibrated acceptance. inference/drafters/hybrid/merged_tree.py and
// calibration.py say what and why, and do the same.
//
// S sources. What a source says of a token is an entry, evidence is one entry a source.

#include <cmath>
#include <functional>
#include <limits>
#include <queue>
#include <utility>

#include "ngram_table.h"

namespace {

constexpr double PRIOR = 4.0, MEMORY = 4000.0;  // as in calibration.py
constexpr double LEAST = -30.0;                 // as in merged_tree.py
constexpr int32_t OTHER = 99, SILENT = std::numeric_limits<int32_t>::min();
constexpr int32_t NOT_INSIDE = -2;  // of a node in a source's own tree; -1 is the base token
constexpr double NOBODY = -1.0;     // no guess
constexpr size_t WIDTH = 4;         // followers of a node that n-grams tell of

struct Cell {
    double accepted, tried;  // prior included

    void count(bool right) {
        accepted += right;
        tried += 1;
        if (tried > MEMORY) accepted /= 2, tried /= 2;
    }
};

// A probability as one of 17 classes.
int32_t confidence(double probability) {
    if (probability >= 0.982) return 8;
    if (probability <= 0.018) return -8;
    return static_cast<int32_t>(std::nearbyint(2 * std::log(probability / (1 - probability))));
}

// What one source says of a token: the entry, what that is worth at first sight, the node of the source's own tree.
struct Opinion {
    int32_t token, entry;
    double guess;
    int32_t inside;
};

class Calibration {
public:
    explicit Calibration(size_t sources) : sources(sources), evidence(sources), entries(2) {}

    // The cell of an evidence, which is guessed where nothing was observed of it yet. guesses [S], NOBODY's where a
    // source does not speak for the token.
    int32_t cell(const int32_t* of, const double* guesses) {
        const int32_t number = evidence.add(of);
        if (static_cast<size_t>(number) == cells.size()) {
            double wrong = 1.0;
            for (size_t source = 0; source < sources; ++source) {
                if (guesses[source] == NOBODY) continue;
                const Cell& one = alone(static_cast<int32_t>(source), of[source], guesses[source]);
                wrong *= 1 - one.accepted / one.tried;
            }
            cells.push_back({PRIOR * (1 - wrong), PRIOR});
        }
        return number;
    }

    Cell& alone(int32_t source, int32_t entry, double guess) {
        const int32_t row[] = {source, entry};
        const int32_t number = entries.add(row);
        if (static_cast<size_t>(number) == cells_alone.size()) cells_alone.push_back({PRIOR * guess, PRIOR});
        return cells_alone[number];
    }

    void count(int32_t number, bool right) {
        cells[number].count(right);
        for (size_t source = 0; source < sources; ++source) {
            const int32_t row[] = {static_cast<int32_t>(source), evidence.row(number)[source]};
            const int32_t known = entries.find(row);
            if (known != Index::NONE) cells_alone[known].count(right);
        }
    }

    const size_t sources;
    Index evidence, entries;
    std::vector<Cell> cells, cells_alone;
};

// What a source has to say in a step: a tree of its own, what it says of each depth, or a text.
struct Source {
    int64_t size, ranks;     // nodes of the tree, or depths; tokens of a depth
    const int64_t *tokens, *parents;
    const float* log_probs;  // of the paths to the tree's nodes
    const bool* candidate;
    const double* levels;    // [2, size, ranks] tokens and their log-probabilities, best first
    double least;            // probability of a token that is told of, but for each depth's first
    const NgramTable* table;

    bool by_level() const { return levels != nullptr; }

    // What may follow a node; returns what is said of all other tokens.
    int32_t opinion(int32_t place, NgramTable::Context context, std::vector<Opinion>& said) const {
        if (table != nullptr) return of_text(context, said);
        if (levels != nullptr) {
            of_level(place + 1, said);
        } else if (tokens != nullptr && place != NOT_INSIDE) {
            of_tree(place, said);
        }
        return said.empty() ? SILENT : OTHER;
    }

private:
    void of_tree(int32_t place, std::vector<Opinion>& said) const {
        for (int64_t node = place + 1; node < size; ++node) {
            if (parents[node] != place || !candidate[node]) continue;
            const double gap = double(log_probs[node]) - (place >= 0 ? double(log_probs[place]) : 0.0);
            const double share = std::exp(gap > LEAST ? std::min(gap, 0.0) : LEAST);
            said.push_back({static_cast<int32_t>(tokens[node]), confidence(share), share, static_cast<int32_t>(node)});
        }
    }

    void of_level(int64_t level, std::vector<Opinion>& said) const {
        if (level >= size) return;
        const double *row = levels + level * ranks, *scores = row + size * ranks;
        for (int64_t rank = 0; rank < ranks; ++rank) {
            const double share = std::exp(std::max(scores[rank], LEAST));
            if (!said.empty() && share < least) break;
            said.push_back({static_cast<int32_t>(row[rank]), confidence(share), share, NOT_INSIDE});
        }
    }

    int32_t of_text(NgramTable::Context context, std::vector<Opinion>& said) const {
        int32_t otherwise = SILENT;
        const auto tell = [&](int32_t token, int32_t entry, double guess) {
            for (const Opinion& one : said) {
                if (one.token == token) return;
            }
            said.push_back({token, entry, guess, NOT_INSIDE});
        };
        for (int32_t c = table->n - 1; c > 0 && said.size() < WIDTH; --c) {
            const Followers* top = table->followers(context, c);
            if (top == nullptr) continue;
            const int32_t level = c + 1;
            int32_t sure = level * 8 + std::min(top->first_count, 3) * 2 + (top->first_count == top->total);
            double worth = double(level - 1) / level / (top->total + 1);
            if (otherwise == SILENT) {
                otherwise = 1000 + sure;
            } else {
                sure += 100, worth /= 2;  // a longer context says something else
            }
            tell(top->first, sure, top->first_count * worth);
            if (top->second >= 0) tell(top->second, -sure, top->second_count * worth);
        }
        return otherwise;
    }
};

class MergedTree {
public:
    MergedTree(const Source* sources, Calibration& calibration) : sources_(sources), calibration_(calibration) {}

    // The nodes that are most probably accepted; the tree of m nodes is not given another below bounds[m].
    void grow(int64_t max_nodes, int64_t max_depth, const double* bounds) {
        bounds_ = bounds;
        least_ = max_nodes == 0 ? 0.0 : *std::min_element(bounds, bounds + max_nodes);
        contexts_at_.assign(1, 0);
        for (size_t source = 0; source < calibration_.sources; ++source) {
            const NgramTable* table = sources_[source].table;
            contexts_at_.push_back(contexts_at_.back() + (table == nullptr ? 0 : table->n));
        }
        places_.assign(calibration_.sources, -1);
        for (size_t source = 0; source < calibration_.sources; ++source) {
            if (const NgramTable* table = sources_[source].table) {
                contexts_.insert(contexts_.end(), table->end(), table->end() + table->n);
            }
        }
        nodes_.push_back({-1, -1, 0, -1, 0, 0.0, {}});
        expand(0);
        while (!queue_.empty() && size() < max_nodes) {
            const auto [score, number] = queue_.top();
            if (score < bounds_[size()]) break;
            queue_.pop();
            take(-number);
            if (nodes_.back().depth < max_depth && size() < max_nodes) expand(nodes_.size() - 1);
        }
        sources_ = nullptr;  // what they point at will change
    }

    int64_t size() const { return static_cast<int64_t>(nodes_.size()) - 1; }

    void write(int64_t* tokens, int64_t* parents, int64_t* sources, float* scores) const {
        for (int64_t node = 0; node < size(); ++node) {
            const Node& one = nodes_[node + 1];
            tokens[node] = one.token, parents[node] = one.parent - 1;
            sources[node] = one.source, scores[node] = static_cast<float>(one.score);
        }
    }

    // Counts what was right and wrong of the tokens that followed. Of the nodes that were accepted, no more than the
    // first `kept` ones can be, their source, and who is needed for them; returns their number.
    int64_t learn(const int64_t* followed, int64_t count, int64_t kept, int64_t* sources, int64_t* needs) const {
        int64_t accepted = 0;
        size_t index = 0;
        for (int64_t i = 0; i < count; ++i) {
            for (const auto& [token, cell] : nodes_[index].considered) calibration_.count(cell, token == followed[i]);
            index = follower(index, followed[i]);
            if (index == 0 || static_cast<int64_t>(index) > kept) break;
            sources[accepted] = nodes_[index].source;
            needs[accepted++] = nodes_[index].needs;
        }
        return accepted;
    }

    // How many of the first `kept` nodes would not be there without a source.
    int64_t needing(int64_t source, int64_t kept) const {
        const auto end = nodes_.begin() + 1 + kept;
        return std::count_if(nodes_.begin() + 1, end, [&](const Node& one) { return one.needs >> source & 1; });
    }

    // [1 + count]: in which row of the target's forward each node of a source's own tree is, -1 where in none.
    void rows(int64_t source, int64_t count, int64_t kept, int64_t* rows) const {
        std::fill_n(rows, count + 1, -1);
        rows[0] = 0;
        for (int64_t index = 1; index <= kept; ++index) {
            const int32_t place = places_[index * calibration_.sources + source];
            if (place != NOT_INSIDE) rows[place + 1] = index;
        }
    }

private:
    struct Node {
        int32_t token, parent, depth;
        int32_t source;  // the first that proposes it
        uint32_t needs;  // bit s: source s alone proposes it or a node above it
        double score;
        std::vector<std::pair<int32_t, int32_t>> considered;  // tokens behind it and the cells of their evidence
    };

    struct Child {
        int32_t token, source, speakers;
        size_t heard;  // sources whose word on it is known
    };

    // The children of a node wait for their turn.
    void expand(size_t index) {
        const size_t count = calibration_.sources;
        children_.clear(), otherwise_.clear();
        evidence_.clear(), guesses_.clear(), inside_.clear();
        for (size_t number = 0; number < count; ++number) {
            said_.clear();
            const int32_t* context = contexts_.data() + index * contexts_at_.back() + contexts_at_[number];
            const int32_t other = sources_[number].opinion(places_[index * count + number], context, said_);
            for (const Opinion& one : said_) {
                const size_t at = child(one.token, static_cast<int32_t>(number));
                if (children_[at].heard > number) continue;  // the source has said it already
                children_[at].heard = number + 1, ++children_[at].speakers;
                evidence_[at * count + number] = one.entry;
                guesses_[at * count + number] = one.guess, inside_[at * count + number] = one.inside;
            }
            otherwise_.push_back(other);
            for (size_t at = 0; at < children_.size(); ++at) {
                if (children_[at].heard <= number) evidence_[at * count + number] = other;
            }
        }
        const double reached = nodes_[index].score;
        for (size_t at = 0; at < children_.size(); ++at) {
            const Child& one = children_[at];
            const int32_t cell = calibration_.cell(&evidence_[at * count], &guesses_[at * count]);
            nodes_[index].considered.emplace_back(one.token, cell);
            const Cell& known = calibration_.cells[cell];
            const double score = reached + std::log(std::max(known.accepted / known.tried, 1e-6));
            if (score < least_) continue;
            queue_.emplace(score, -static_cast<int64_t>(waiting_.size()));  // of equals the one that came first
            const auto parent = static_cast<int32_t>(index), depth = nodes_[index].depth + 1;
            const uint32_t needs = nodes_[index].needs | (one.speakers == 1 ? 1u << one.source : 0u);
            waiting_.push_back({one.token, parent, depth, one.source, needs, score, {}});
            const auto inside = inside_.begin() + at * count;
            waiting_inside_.insert(waiting_inside_.end(), inside, inside + count);
        }
    }

    // The child of a token, a new one where nobody named it before.
    size_t child(int32_t token, int32_t source) {
        const auto same = [&](const Child& child) { return child.token == token; };
        const size_t at = std::find_if(children_.begin(), children_.end(), same) - children_.begin();
        if (at == children_.size()) {
            const size_t count = calibration_.sources;
            children_.push_back({token, source, 0, 0});
            evidence_.insert(evidence_.end(), otherwise_.begin(), otherwise_.end());
            evidence_.resize(children_.size() * count);
            guesses_.resize(children_.size() * count, NOBODY);
            inside_.resize(children_.size() * count, NOT_INSIDE);
        }
        return at;
    }

    // One that waits becomes a node.
    void take(size_t number) {
        const size_t count = calibration_.sources, width = contexts_at_.back();
        nodes_.push_back(waiting_[number]);
        const Node& node = nodes_.back();
        contexts_.resize(nodes_.size() * width);
        const int32_t* before = contexts_.data() + node.parent * width;
        int32_t* context = contexts_.data() + (nodes_.size() - 1) * width;
        for (size_t source = 0; source < count; ++source) {
            places_.push_back(sources_[source].by_level() ? node.depth - 1 : waiting_inside_[number * count + source]);
            const size_t at = contexts_at_[source];
            if (const auto* table = sources_[source].table) table->after(before + at, node.token, context + at);
        }
    }

    // The node of a token behind another, 0 where it got none.
    size_t follower(size_t parent, int64_t token) const {
        for (size_t index = parent + 1; index < nodes_.size(); ++index) {
            if (nodes_[index].parent == static_cast<int32_t>(parent) && nodes_[index].token == token) return index;
        }
        return 0;
    }

    const Source* sources_;
    Calibration& calibration_;
    const double* bounds_ = nullptr;
    double least_ = 0.0;
    std::vector<size_t> contexts_at_;  // where the context of each source begins among a node's
    std::vector<Node> nodes_, waiting_;
    std::vector<int32_t> places_, contexts_;   // of every node, in each source's own tree, and the text up to it
    std::vector<int32_t> waiting_inside_;      // of those that wait, in each source's own tree
    std::priority_queue<std::pair<double, int64_t>> queue_;
    // Of the node that is being expanded; evidence, guesses and places in the sources' trees [children, S].
    std::vector<Opinion> said_;
    std::vector<Child> children_;
    std::vector<int32_t> otherwise_, evidence_, inside_;
    std::vector<double> guesses_;
};

}  // namespace

extern "C" {

NgramTable* ngram_table(int64_t n) { return new NgramTable(static_cast<int32_t>(n)); }
void ngram_table_free(NgramTable* table) { delete table; }
void ngram_table_start(NgramTable* table, bool keep) { table->start(keep); }
void ngram_table_extend(NgramTable* table, const int64_t* tokens, int64_t count) { table->extend(tokens, count); }
void ngram_table_end(const NgramTable* table, int32_t* end) { std::copy_n(table->end(), table->n, end); }

void ngram_table_after(const NgramTable* table, const int32_t* context, int64_t token, int32_t* longer) {
    table->after(context, static_cast<int32_t>(token), longer);
}

// [6] the level and `Followers` of the last c tokens; false: nothing ever followed them.
bool ngram_table_followers(const NgramTable* table, const int32_t* context, int64_t c, int64_t* found) {
    const Followers* top = table->followers(context, static_cast<int32_t>(c));
    if (top == nullptr) return false;
    found[0] = c + 1, found[1] = top->first, found[2] = top->first_count;
    found[3] = top->second, found[4] = top->second_count, found[5] = top->total;
    return true;
}

// Tokens and their shares [2 (n − 1)] of what followed a context, all levels together; returns how many.
int64_t ngram_table_shares(const NgramTable* table, const int32_t* context, int64_t* tokens, double* shares) {
    int64_t count = 0;
    const auto add = [&](int32_t token, double share) {
        const int64_t at = std::find(tokens, tokens + count, token) - tokens;
        if (at == count) tokens[at] = token, shares[at] = 0.0, ++count;
        shares[at] += share;
    };
    double left = 1.0;
    for (int32_t c = table->n - 1; c > 0; --c) {
        const Followers* top = table->followers(context, c);
        if (top == nullptr) continue;
        const double say = left / (top->total + 2);
        add(top->first, say * top->first_count);
        if (top->second >= 0) add(top->second, say * top->second_count);
        left = 2 * say;
    }
    return count;
}

// The most frequent continuation of the text, no longer than `most`; returns its length.
int64_t ngram_table_chain(const NgramTable* table, int64_t most, int64_t* tokens) {
    std::vector<int32_t> context(table->end(), table->end() + table->n), longer(table->n);
    int64_t count = 0;
    int32_t c;
    for (; count < most; ++count) {
        const Followers* top = table->longest(context.data(), c);
        if (top == nullptr) break;
        tokens[count] = top->first;
        table->after(context.data(), top->first, longer.data());
        context.swap(longer);
    }
    return count;
}

Calibration* calibration(int64_t sources) { return new Calibration(sources); }
void calibration_free(Calibration* calibration) { delete calibration; }
int64_t calibration_cells(const Calibration* calibration) { return calibration->cells.size(); }
int64_t calibration_cells_alone(const Calibration* calibration) { return calibration->cells_alone.size(); }

// The evidence [S], or source and entry, of a cell, and what is in it.
void calibration_cell(const Calibration* calibration, int64_t number, int32_t* evidence, double* cell) {
    std::copy_n(calibration->evidence.row(number), calibration->sources, evidence);
    cell[0] = calibration->cells[number].accepted, cell[1] = calibration->cells[number].tried;
}

void calibration_cell_alone(const Calibration* calibration, int64_t number, int32_t* entry, double* cell) {
    std::copy_n(calibration->entries.row(number), 2, entry);
    cell[0] = calibration->cells_alone[number].accepted, cell[1] = calibration->cells_alone[number].tried;
}

void calibration_put(Calibration* calibration, const int32_t* evidence, double accepted, double tried) {
    const std::vector<double> nobodys(calibration->sources, NOBODY);
    calibration->cells[calibration->cell(evidence, nobodys.data())] = {accepted, tried};
}

void calibration_put_alone(Calibration* calibration, int64_t source, int64_t entry, double accepted, double tried) {
    calibration->alone(static_cast<int32_t>(source), static_cast<int32_t>(entry), 0.0) = {accepted, tried};
}

// Sources [S], bounds [max_nodes]; the tree is written to tokens, parents, source and scores [max_nodes], its nodes
// counted in size.
MergedTree* merged_tree(const Source* sources, Calibration* calibration, int64_t max_nodes, int64_t max_depth,
                        const double* bounds, int64_t* tokens, int64_t* parents, int64_t* source, float* scores,
                        int64_t* size) {
    auto* merged = new MergedTree(sources, *calibration);
    merged->grow(max_nodes, max_depth, bounds);
    merged->write(tokens, parents, source, scores);
    *size = merged->size();
    return merged;
}

void merged_tree_free(MergedTree* merged) { delete merged; }

int64_t merged_tree_learn(const MergedTree* merged, const int64_t* followed, int64_t count, int64_t kept,
                          int64_t* sources, int64_t* needs) {
    return merged->learn(followed, count, kept, sources, needs);
}

int64_t merged_tree_needing(const MergedTree* merged, int64_t source, int64_t kept) {
    return merged->needing(source, kept);
}

void merged_tree_rows(const MergedTree* merged, int64_t source, int64_t count, int64_t kept, int64_t* rows) {
    merged->rows(source, count, kept, rows);
}
}
