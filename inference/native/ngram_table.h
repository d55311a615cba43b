// Counts of what followed what. inference/drafters/text/ngram_table.py says what and why; here n-grams are a trie.

#pragma once

#include "index.h"

// What followed a context: the most frequent token, its count, the second (-1: none), its count, the count of all.
struct Followers {
    int32_t first = -1, first_count = 0, second = -1, second_count = 0, total = 0;
};

class NgramTable {
public:
    // The end of some text: at [c] the trie's node of its last c tokens, NOWHERE where they have none.
    using Context = const int32_t*;
    static constexpr int32_t NOWHERE = -1;

    explicit NgramTable(int32_t n) : n(n), trie_(2), nodes_(1) { start(false); }

    void start(bool keep) {
        end_.assign(n, NOWHERE);
        end_[0] = 0;
        if (keep) return;
        trie_.clear();
        nodes_.assign(1, {});
    }

    void extend(const int64_t* tokens, size_t count) {
        for (size_t i = 0; i < count; ++i) append(static_cast<int32_t>(tokens[i]));
    }

    Context end() const { return end_.data(); }

    // The end of a text with one more token.
    void after(Context context, int32_t token, int32_t* longer) const {
        longer[0] = 0;
        for (int32_t c = 1; c < n; ++c) longer[c] = child(context[c - 1], token);
    }

    // What followed the last c tokens; nullptr: nothing ever did.
    const Followers* followers(Context context, int32_t c) const {
        const int32_t node = context[c];
        return node == NOWHERE || nodes_[node].followers.total == 0 ? nullptr : &nodes_[node].followers;
    }

    // The same of the longest context that was seen.
    const Followers* longest(Context context, int32_t& c) const {
        for (c = n - 1; c > 0; --c) {
            if (const Followers* found = followers(context, c)) return found;
        }
        return nullptr;
    }

    const int32_t n;

private:
    struct Node {
        int32_t count = 0;  // of the whole n-gram
        Followers followers;
    };

    int32_t child(int32_t node, int32_t token) const {
        const int32_t row[] = {node, token};
        return node == NOWHERE ? NOWHERE : trie_.find(row) == Index::NONE ? NOWHERE : trie_.find(row) + 1;
    }

    int32_t grown(int32_t node, int32_t token) {
        const int32_t row[] = {node, token};
        const int32_t child = trie_.add(row) + 1;
        if (static_cast<size_t>(child) == nodes_.size()) nodes_.emplace_back();
        return child;
    }

    void append(int32_t token) {
        int32_t shorter = grown(0, token);  // the node of the context that the next length ends with
        for (int32_t c = 1; c < n; ++c) {
            const int32_t context = end_[c];
            end_[c] = shorter;
            if (context == NOWHERE) break;  // the text is shorter than this context, and so than all longer ones
            shorter = grown(context, token);
            count(nodes_[context].followers, token, ++nodes_[shorter].count);
        }
    }

    static void count(Followers& top, int32_t token, int32_t count) {
        ++top.total;
        if (token == top.first) {
            top.first_count = count;
        } else if (count >= top.first_count) {
            top.second = top.first, top.second_count = top.first_count;
            top.first = token, top.first_count = count;
        } else if (count >= top.second_count) {
            top.second = token, top.second_count = count;
        }
    }

    Index trie_;  // of node and token, the next node − 1
    std::vector<Node> nodes_;
    std::vector<int32_t> end_;
};
