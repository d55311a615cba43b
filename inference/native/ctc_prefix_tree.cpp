// The draft tree that is optimal under a CTC head; see inference/drafters/heads/ctc_search.py.
//
// Shapes: T frames, V vocabulary, C candidate labels (those that can be in the tree), M nodes.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <tuple>
#include <vector>

namespace {

// An expanded prefix: its last label and γⁿ, γᵇ before each frame.
struct State {
    State(int column, size_t frames) : column(column), in_label(frames, 0.0f), in_blank(frames, 0.0f) {}
    int column;  // of the last label among the candidates; -1: the empty prefix
    std::vector<float> in_label, in_blank;
};

// A prefix by its Ψ, the probability that the collapse of the frames starts with it.
struct Prefix {
    float score;
    int column, depth;
    size_t parent;     // index of the parent's state
    size_t state = 0;  // index of its own state, once it has been expanded

    // Equal scores: the shorter first, so a parent stands before its children.
    bool before(const Prefix& other) const { return score != other.score ? score > other.score : depth < other.depth; }
};

void add(float* sums, const float* values, float factor, size_t count) {
    for (size_t i = 0; i < count; ++i) sums[i] += factor * values[i];
}

// The count-th largest value, 0 if there are fewer.
float nth_largest(const std::vector<float>& values, size_t count) {
    std::priority_queue<float, std::vector<float>, std::greater<float>> largest;  // the smallest on top
    for (const float value : values) {
        if (largest.size() == count && value <= largest.top()) continue;
        largest.push(value);
        if (largest.size() > count) largest.pop();
    }
    return largest.size() == count ? largest.top() : 0.0f;
}

class Search {
public:
    // probs [T, V + 1], the blank last.
    Search(const float* probs, size_t frames, size_t vocabulary, size_t max_nodes)
        : frames_(frames), max_nodes_(max_nodes) {
        State empty(-1, frames);
        float blanks = 1.0f;
        for (size_t t = 0; t < frames; ++t) {
            empty.in_blank[t] = blanks;
            blank_.push_back(probs[t * (vocabulary + 1) + vocabulary]);
            blanks *= blank_[t];
        }
        select_candidates(probs, vocabulary, empty.in_blank);
        states_.push_back(std::move(empty));
    }

    // The best M prefixes of at most `max_depth` labels, the shortest first, of equal length the best first.
    //
    // A child's Ψ never exceeds its parent's: a prefix that dropped out of the best has no descendant among them, and
    // new children are inserted behind the prefix that is being expanded.
    std::vector<Prefix> run(int max_depth) {
        expand({1.0f, -1, 0, 0});
        for (size_t next = 0; next < best_.size(); ++next) {
            if (best_[next].depth == max_depth) continue;
            best_[next].state = states_.size();
            states_.push_back(state_of(best_[next]));
            expand(best_[next]);
        }
        const auto shorter = [](const Prefix& a, const Prefix& b) { return a.depth < b.depth; };
        std::stable_sort(best_.begin(), best_.end(), shorter);
        return best_;
    }

    int64_t label(const Prefix& prefix) const { return labels_[prefix.column]; }
    size_t states() const { return states_.size(); }

private:
    // A label whose probabilities, summed over the frames, stay below the M-th best Ψ of a single label is in no
    // prefix of the tree. The others are the candidates, largest sum first.
    void select_candidates(const float* probs, size_t vocabulary, const std::vector<float>& blanks_before) {
        std::vector<float> sums(vocabulary, 0.0f), alone(vocabulary, 0.0f);
        for (size_t t = 0; t < frames_; ++t) {
            const float* row = probs + t * (vocabulary + 1);
            add(sums.data(), row, 1.0f, vocabulary);
            add(alone.data(), row, blanks_before[t], vocabulary);
        }
        const float least = nth_largest(alone, max_nodes_);
        for (size_t c = 0; c < vocabulary; ++c) {
            if (sums[c] >= least) labels_.push_back(static_cast<int64_t>(c));
        }
        STD_TORCH_CHECK(!labels_.empty(), "probs must be probabilities; got nan; look at the head's weights");
        std::sort(labels_.begin(), labels_.end(), [&](int64_t a, int64_t b) { return sums[a] > sums[b]; });
        for (const int64_t c : labels_) sums_.push_back(sums[c]);
        for (size_t t = 0; t < frames_; ++t) {
            for (const int64_t c : labels_) probs_.push_back(probs[t * (vocabulary + 1) + c]);
        }
        scores_.resize(labels_.size());
    }

    // How many candidates, from the first, may extend the prefix to one of the best: Ψ(p·c) ≤ max_t φ_t · Σ_t p_t(c).
    size_t promising(const State& state) const {
        if (best_.size() < max_nodes_) return labels_.size();
        float most = 0.0f;
        for (size_t t = 0; t < frames_; ++t) most = std::max(most, state.in_label[t] + state.in_blank[t]);
        const float least = best_.back().score;
        const auto may = [&](float sum) { return sum * most >= least; };
        return std::partition_point(sums_.begin(), sums_.end(), may) - sums_.begin();
    }

    // p_t of the candidates.
    const float* frame(size_t t) const { return probs_.data() + t * labels_.size(); }

    // φ_t(p, c) = γᵇ_{t−1}(p) + [c ≠ last(p)]·γⁿ_{t−1}(p)
    // γⁿ_t(p·c) = (γⁿ_{t−1}(p·c) + φ_t(p, c))·p_t(c), γᵇ_t(p·c) = (γᵇ_{t−1}(p·c) + γⁿ_{t−1}(p·c))·p_t(blank)
    State state_of(const Prefix& prefix) const {
        const State& parent = states_[prefix.parent];
        const bool repeats = parent.column == prefix.column;
        State own(prefix.column, frames_);
        for (size_t t = 0; t + 1 < frames_; ++t) {
            const float begins = parent.in_blank[t] + (repeats ? 0.0f : parent.in_label[t]);
            own.in_label[t + 1] = (own.in_label[t] + begins) * frame(t)[prefix.column];
            own.in_blank[t + 1] = (own.in_blank[t] + own.in_label[t]) * blank_[t];
        }
        return own;
    }

    // Ψ(p·c) = Σ_t φ_t(p, c)·p_t(c) of every candidate c, for the prefix whose state is the last.
    void expand(const Prefix parent) {
        const State& state = states_.back();
        const size_t count = promising(state);
        std::fill_n(scores_.begin(), count, 0.0f);
        float repeated = 0.0f;
        for (size_t t = 0; t < frames_; ++t) {
            add(scores_.data(), frame(t), state.in_label[t] + state.in_blank[t], count);
            if (state.column >= 0) repeated += state.in_blank[t] * frame(t)[state.column];
        }
        if (state.column >= 0) scores_[state.column] = repeated;
        for (size_t c = 0; c < count; ++c) {
            insert({std::min(scores_[c], parent.score), static_cast<int>(c), parent.depth + 1, states_.size() - 1});
        }
    }

    // Insert the prefix if it is among the best M.
    void insert(const Prefix& prefix) {
        if (best_.size() == max_nodes_) {
            if (!prefix.before(best_.back())) return;
            best_.pop_back();
        }
        auto place = best_.end();
        while (place != best_.begin() && prefix.before(*(place - 1))) --place;
        best_.insert(place, prefix);
    }

    size_t frames_, max_nodes_;
    std::vector<float> blank_, probs_, sums_, scores_;
    std::vector<int64_t> labels_;
    std::vector<State> states_;
    std::vector<Prefix> best_;
};

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Labels, parents and log Ψ [M] of the best prefixes of probs [T, V + 1].
std::tuple<Tensor, Tensor, Tensor> ctc_prefix_tree(Tensor probs, int64_t max_nodes, int64_t max_depth) {
    const bool fits = probs.dim() == 2 && probs.scalar_type() == ScalarType::Float;
    STD_TORCH_CHECK(fits, "probs must be [T, V + 1] in float32");
    if (!probs.is_contiguous()) probs = torch::stable::contiguous(probs);
    const auto* values = static_cast<const float*>(probs.const_data_ptr());
    Search search(values, probs.size(0), probs.size(1) - 1, max_nodes);
    const auto best = search.run(static_cast<int>(max_depth));
    const auto size = static_cast<int64_t>(best.size());
    Tensor labels = torch::stable::new_empty(probs, {size}, ScalarType::Long);
    Tensor parents = torch::stable::new_empty(probs, {size}, ScalarType::Long);
    Tensor log_probs = torch::stable::new_empty(probs, {size});
    auto* label = static_cast<int64_t*>(labels.mutable_data_ptr());
    auto* parent = static_cast<int64_t*>(parents.mutable_data_ptr());
    auto* log_prob = static_cast<float*>(log_probs.mutable_data_ptr());
    std::vector<int64_t> node_of(search.states(), -1);
    for (int64_t node = 0; node < size; ++node) {
        if (best[node].state != 0) node_of[best[node].state] = node;
        label[node] = search.label(best[node]);
        parent[node] = node_of[best[node].parent];
        log_prob[node] = std::log(std::max(best[node].score, 1e-37f));
    }
    return {labels, parents, log_probs};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(draft_heads, library) {
    library.def("ctc_prefix_tree(Tensor probs, int max_nodes, int max_depth) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(draft_heads, CPU, library) { library.impl("ctc_prefix_tree", TORCH_BOX(&ctc_prefix_tree)); }
