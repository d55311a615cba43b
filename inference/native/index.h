// Rows of integers by number: the first row that is added gets 0, the next other one 1, and so on.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

class Index {
public:
    static constexpr int32_t NONE = -1;

    explicit Index(size_t width) : width_(width), slots_(64, NONE) {}

    size_t size() const { return rows_.size() / width_; }
    const int32_t* row(int32_t number) const { return rows_.data() + number * width_; }

    // The number of a row, NONE where it was not added.
    int32_t find(const int32_t* row) const { return slots_[slot(row)]; }

    // The same; a row that is not there is added.
    int32_t add(const int32_t* row) {
        size_t at = slot(row);
        if (slots_[at] != NONE) return slots_[at];
        if (2 * (size() + 1) > slots_.size()) {
            grow();
            at = slot(row);
        }
        slots_[at] = static_cast<int32_t>(size());
        rows_.insert(rows_.end(), row, row + width_);
        return slots_[at];
    }

    void clear() {
        rows_.clear();
        slots_.assign(64, NONE);
    }

private:
    // Where a row's number is, or would be.
    size_t slot(const int32_t* row) const {
        uint64_t hash = 0;
        for (size_t i = 0; i < width_; ++i) {
            hash = (hash ^ static_cast<uint32_t>(row[i])) * 0x9E3779B97F4A7C15u;
            hash ^= hash >> 29;
        }
        size_t at = hash & (slots_.size() - 1);
        while (slots_[at] != NONE && !std::equal(row, row + width_, this->row(slots_[at]))) {
            at = (at + 1) & (slots_.size() - 1);
        }
        return at;
    }

    void grow() {
        slots_.assign(2 * slots_.size(), NONE);
        const auto count = static_cast<int32_t>(size());
        for (int32_t number = 0; number < count; ++number) slots_[slot(row(number))] = number;
    }

    size_t width_;
    std::vector<int32_t> rows_, slots_;
};
