// Products of strips.cpp and packed.cpp against plain integers, without Python: for machines that are emulated.
// Prints "exact" and how bytes are multiplied, or the first product that differs.
#include <cstdio>
#include <random>
#include <vector>

#include "packed.h"

extern "C" void quire_packed_linear_f32(const Product<float>*);

static std::mt19937 random_bits(7);
static int any(int below) { return int(random_bits() % unsigned(below)); }

// Where code (n, i) of a plane of `bits` bits is: strip, span, vector, lane, byte; and its place in the byte.
static void put(std::vector<uint8_t>& plane, int bits, int64_t k, int64_t n, int64_t i, int code) {
    const int64_t four = i % 32 / 4, at = (((n / 16) * (k / 32) + i / 32) * bits + four % bits) * 64 + n % 16 * 4 + i % 4;
    plane[at] |= uint8_t(code << (four / bits * bits));
}

static bool check(int64_t kind, int bits, int high_bits, int64_t zero, bool own_zeros, int64_t k) {
    const int64_t n = 37, strips = 3, rows = 11;
    std::vector<uint8_t> codes(strips * k * 16 * bits / 8), high(strips * k * 16 * high_bits / 8);
    std::vector<uint8_t> zeros(strips * 16);
    std::vector<float> scale(strips * 16, 1.0f);
    std::vector<uint16_t> half(strips * 16 * (k / 32), 0x3c00);  // 1
    std::vector<int> values(n * k);
    for (int64_t r = 0; r < n; r++) {
        zeros[r] = own_zeros ? uint8_t(any(1 << bits)) : uint8_t(zero);
        for (int64_t i = 0; i < k; i++) {
            const int code = r == 0 ? (1 << (bits + high_bits)) - 1 : any(1 << (bits + high_bits));
            put(codes, bits, k, r, i, code & ((1 << bits) - 1));
            if (high_bits) put(high, high_bits, k, r, i, code >> bits);
            values[r * k + i] = code - zeros[r];
        }
    }
    std::vector<float> x(rows * k), y(rows * n);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t i = 0; i < k; i++) x[m * k + i] = m == 1 ? 127 : m == 2 ? -127 : float(any(255) - 127);
    // Blocks of 32 inputs are rounded by their own largest number: make it 127.
    for (int64_t m = 0; m < rows; m++)
        for (int64_t i = 0; i < k; i += 32) x[m * k + i] = 127;
    Product<float> p{};
    p.weight.codes = codes.data(), p.weight.high = high_bits ? high.data() : nullptr;
    p.weight.minimum = reinterpret_cast<const int8_t*>(zeros.data());
    p.weight.d = kind >= kStripKinds ? reinterpret_cast<const uint16_t*>(scale.data()) : half.data();
    p.x = x.data(), p.y = y.data();
    p.rows = rows, p.n = n, p.k = k, p.x_stride = k, p.y_stride = n, p.kind = kind, p.block = k, p.group = k;
    p.threads = 2;
    quire_packed_linear_f32(&p);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t r = 0; r < n; r++) {
            int64_t sum = 0;
            for (int64_t i = 0; i < k; i++) sum += int64_t(x[m * k + i]) * values[r * k + i];
            if (y[m * n + r] != float(sum)) {
                std::printf("kind %ld row %ld output %ld: %f, not %ld\n", long(kind), long(m), long(r), y[m * n + r], long(sum));
                return false;
            }
        }
    return true;
}

int main() {
    bool is_exact = check(kStripKinds, 2, 0, 1, false, 512) && check(kStripKinds + 1, 4, 0, 8, false, 512) &&
                    check(kStripKinds + 2, 4, 0, 0, true, 512) && check(kStripKinds + 3, 8, 0, 128, false, 512) &&
                    check(kStripKinds + 4, 8, 0, 0, true, 512) && check(0, 4, 0, 8, false, 128) &&
                    check(2, 4, 1, 16, false, 128) && check(4, 8, 0, 128, false, 128);
    if (is_exact) std::printf("exact %d %d\n", QUIRE_DOT, kLanes);
    return !is_exact;
}
