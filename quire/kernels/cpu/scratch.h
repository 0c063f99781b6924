// Working memory of a thread, kept between calls: aligned to a cache line, grown when needed, never shrunk.
#pragma once

#include <cstdint>
#include <cstdlib>

struct Scratch {
    float* data = nullptr;
    int64_t size = 0;

    float* get(int64_t floats) {
        if (floats > size) {
            std::free(data);
            size = (floats + 1023) / 1024 * 1024;
            data = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
            if (!data) std::abort();
        }
        return data;
    }
    ~Scratch() { std::free(data); }
};
