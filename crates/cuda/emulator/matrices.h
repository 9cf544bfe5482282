// ldmatrix and mma.sync, by the layouts of the PTX manual.
#pragma once
#include "memory.h"

namespace emulator {
struct LoadMatricesArgument {
    u32 address;
    u32* result;
};
// Matrix n: its 8 rows of 16 bytes are at the addresses of lanes 8n to 8n + 7. Lane l receives the elements (l / 4, 2
// (l % 4)) and the next in the row; transposed, (2 (l % 4), l / 4) and the next in the column.
inline void load_matrices(u32 (&result)[4], u32 address, bool is_transposed) {
    LoadMatricesArgument own{address, result};
    auto run = [is_transposed](void** all) {
        auto& m = machine();
        for (int matrix = 0; matrix < 4; matrix++) {
            u16 x[8][8];
            for (int row = 0; row < 8; row++) {
                const u32 at = ((LoadMatricesArgument*)all[matrix * 8 + row])->address;
                check_shared(at, 16, 16, "ldmatrix");
                note_read(at, 16, access_now(m.current, SEVERAL), "ldmatrix");
                memcpy(x[row], &m.shared[at], 16);
            }
            for (int l = 0; l < 32; l++) {
                const int group = l / 4, pair = 2 * (l % 4);
                const u32 low = is_transposed ? x[pair][group] : x[group][pair];
                const u32 high = is_transposed ? x[pair + 1][group] : x[group][pair + 1];
                ((LoadMatricesArgument*)all[l])->result[matrix] = low | high << 16;
            }
        }
    };
    collective(is_transposed ? "ldmatrix.trans" : "ldmatrix", &own, run);
}

struct MultiplyArgument {
    float* c;
    const u32* a;
    u32 b0, b1;
};
// Adds a (16 x K) times b (K x 8) to the accumulators of the lanes: row l / 4, and 8 below for the last two; columns
// 2 (l % 4) and the next.
template <int K> void add_products(void** all, const float (&a)[16][K], const float (&b)[K][8]) {
    for (int l = 0; l < 32; l++) {
        auto* one = (MultiplyArgument*)all[l];
        for (int e = 0; e < 4; e++) {
            float sum = 0;
            for (int k = 0; k < K; k++) sum += a[l / 4 + 8 * (e / 2)][k] * b[k][2 * (l % 4) + (e & 1)];
            one->c[e] += sum;
        }
    }
}
template <bool IS_BF16> float half_to_f32(u16 half) { return IS_BF16 ? bf16_to_f32(half) : f16_to_f32(half); }
template <bool IS_BF16> void multiply_add_16816(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    MultiplyArgument own{c, a, b0, b1};
    collective(IS_BF16 ? "mma.bf16" : "mma.f16", &own, [](void** all) {
        static float left[16][16], right[16][8];
        for (int l = 0; l < 32; l++) {
            auto* one = (MultiplyArgument*)all[l];
            const int group = l / 4, pair = 2 * (l % 4);
            for (int e = 0; e < 8; e++) { // 2 and 3 of each four are 8 rows below, the last four 8 columns to the right
                const u16 half = u16(one->a[e / 2] >> 16 * (e & 1));
                left[group + 8 * (e / 2 % 2)][pair + (e & 1) + 8 * (e / 4)] = half_to_f32<IS_BF16>(half);
            }
            for (int e = 0; e < 4; e++) { // the last two are 8 rows below
                const u16 half = u16((e < 2 ? one->b0 : one->b1) >> 16 * (e & 1));
                right[pair + (e & 1) + 8 * (e / 2)][group] = half_to_f32<IS_BF16>(half);
            }
        }
        add_products<16>(all, left, right);
    });
}
inline void multiply_add_1688_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    MultiplyArgument own{c, a, b0, b1};
    collective("mma.tf32", &own, [](void** all) {
        static float left[16][8], right[8][8];
        for (int l = 0; l < 32; l++) {
            auto* one = (MultiplyArgument*)all[l];
            const int group = l / 4, column = l % 4;
            for (int e = 0; e < 4; e++) left[group + 8 * (e % 2)][column + 4 * (e / 2)] = read_tf32(one->a[e]);
            right[column][group] = read_tf32(one->b0);
            right[column + 4][group] = read_tf32(one->b1);
        }
        add_products<8>(all, left, right);
    });
}
} // namespace emulator
