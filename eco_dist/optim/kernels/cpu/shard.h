// What Python hands over: mirrored by ctypes structures in eco_dist/optim/kernels/cpu_abi.py.
#pragma once
#include <cstdint>

struct Shard {
    void* codes;         // of format FP32: the weight itself
    float* scales;       // null for BF16
    const void* grad;    // fp32 or bf16
    void* exp_avg;
    float* exp_avg_scale;  // 8-bit moments only
    void* exp_avg_sq;      // null for SGD
    float* exp_avg_sq_scale;
    void* extra;    // residual or master weight
    float* absmax;  // granularity `tensor`: written by eco_absmax, read by eco_step
    int64_t rows, columns, first_row;
    uint64_t seed;
    uint32_t tensor, step;
    // AdamW: m = m beta1 + g factor1; v = v beta2 + g^2 factor2; d = sqrt(v) root2 + eps; t = w decay - m/d step_size
    float grad_scale, beta1, factor1, beta2, factor2, root2, eps, decay, step_size, gain;
};

enum Granularity { ROW, BLOCK, TENSOR, NONE };
enum Compensation { MOMENTUM, RESIDUAL, LOSE, MASTER };
enum Moments { M_FP32, M_BF16, M_FP8, M_DYNAMIC8 };
enum Rule { ADAMW, ADAMW_DISPLACEMENT, SGD };

struct Kind {
    int32_t format, granularity, stochastic, compensation, residual_is_fp32, moments, stochastic_moments, skip_idle;
    int32_t grad_is_bf16, rule;
    const float* dynamic_values[2];   // 256 each: first moment (signed), second
    const float* dynamic_middles[2];  // 255 each
};

struct Stats {
    double squared_error, squared_weight;
    int64_t moved, elements;
};
