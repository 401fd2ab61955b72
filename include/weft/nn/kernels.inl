// The list of kernels: one row for each. From it kernels.hpp and kernel_rows.hpp make everything that has a
// member, a function or a description for each kernel. It is included several times. The code that includes
// it defines the two macros of the rows; the end of the list undefines them:
//
//   WEFT_KERNEL(name, (parameters without the KernelContext), operands…)
//   WEFT_KERNEL_F32_BF16(name, (parameters), operands…)     the same for T = float and, as name_bf16, T = bf16
//
// Kernels of bf16 compute in f32. Operands are widened, and each result in bf16 is rounded once, to nearest
// even, when it is stored. So all kernels except the products have the bits of the f32 kernel on widened
// operands, rounded.
//
// An operand is a parameter that is an array in the device's memory. The operands are in the order of their
// parameters, each with its dimensions. So the number of elements is a function of the arguments:
//
//   reads(x, rows, dim)      the kernel reads x: (rows, dim)
//   writes(y, rows, dim)     it overwrites all of y
//   updates(y, rows, dim)    it reads and writes y, or keeps some elements: "+="
//   optional(reads(…))       the pointer may be null
//
// Rules for all kernels:
//  - Arrays are dense and row-major, in memory of the context's device. An input may be the output where "in
//    place" is said, nowhere else.
//  - Any size may be 0. Then nothing is read, and outputs that have elements become the value of an empty
//    sum.
//  - The CPU has done the work when a call returns. Another device does it on the context's stream, after all
//    work queued there before; errors about the data are then thrown by the next wait for the stream.
//  - On the CPU the result's bits depend on the input alone, not on the number of threads: every sum runs
//    over blocks of a fixed size in a fixed order.

// clang-format off

// ---- Products ----

/// c = a b, or c += a b when `accumulate`. a is stored (k, m) when `a_stored` is transposed, b (n, k) when
/// `b_stored` is. bf16 products are summed in f32.
WEFT_KERNEL_F32_BF16(matmul,
    (const T* a, Stored a_stored, WeightOf<T> b, Stored b_stored, float* c, std::int64_t m, std::int64_t n,
     std::int64_t k, bool accumulate),
    reads(a, m, k), reads(b, k, n), updates(c, m, n))
/// c = a b, whose elements are sums over k as `tree` says. If several calls make the parts of a tree, and the
/// parts are added as the tree says, the result has the bits of one call. In exact mode.
WEFT_KERNEL_F32_BF16(tree_matmul,
    (const T* a, Stored a_stored, WeightOf<T> b, Stored b_stored, float* c, std::int64_t m, std::int64_t n,
     std::int64_t k, ProductTree tree),
    reads(a, m, k), reads(b, k, n), writes(c, m, n))
/// c = a b, or c = a b + bias, row by row, if there is a bias. Sums are in f32.
WEFT_KERNEL(matmul_to_bf16,
    (const bf16* a, Stored a_stored, WeightMatrix b, Stored b_stored, const float* bias, bf16* c,
     std::int64_t m, std::int64_t n, std::int64_t k),
    reads(a, m, k), reads(b, k, n), optional(reads(bias, n)), writes(c, m, n))
/// c = a b^T, each element rounded once from a sum whose error does not grow with k. The rows of a are lda
/// apart, those of b are ldb apart.
WEFT_KERNEL(row_products,
    (const float* a, std::int64_t lda, const float* b, std::int64_t ldb, float* c, std::int64_t m,
     std::int64_t n, std::int64_t k),
    reads(a, strided(m, lda, k)), reads(b, strided(n, ldb, k)), writes(c, m, n))
/// y = x w^T + bias.
WEFT_KERNEL_F32_BF16(linear_forward,
    (const T* x, WeightOf<T> w, const float* bias, float* y, LinearShape s),
    reads(x, s.tokens, s.in), reads(w, s.out, s.in), optional(reads(bias, s.out)), writes(y, s.tokens, s.out))
/// dx = dy w.
WEFT_KERNEL(linear_backward_input,
    (const float* dy, const float* w, float* dx, LinearShape s),
    reads(dy, s.tokens, s.out), reads(w, s.out, s.in), writes(dx, s.tokens, s.in))
/// dw += dy^T x, dbias += the sum of dy's rows.
WEFT_KERNEL(linear_backward_weight,
    (const float* dy, const float* x, float* dw, float* dbias, LinearShape s),
    reads(dy, s.tokens, s.out), reads(x, s.tokens, s.in), updates(dw, s.out, s.in),
    optional(updates(dbias, s.out)))
/// y += bias, row by row.
WEFT_KERNEL_F32_BF16(add_bias,
    (const float* bias, T* y, std::int64_t tokens, std::int64_t out),
    reads(bias, out), updates(y, tokens, out))
/// dbias += the sum of dy's rows, in blocks of rows.
WEFT_KERNEL_F32_BF16(bias_backward,
    (const T* dy, float* dbias, std::int64_t tokens, std::int64_t out),
    reads(dy, tokens, out), updates(dbias, out))

// ---- Norms ----

/// y = x * inv_rms * weight, inv_rms = 1 / sqrt(mean of x^2 over dim + eps), which is kept for the backward
/// pass. In place: y may be x.
WEFT_KERNEL_F32_BF16(rms_norm_forward,
    (const T* x, const float* weight, T* y, float* inv_rms, std::int64_t rows, std::int64_t dim,
     float eps),
    reads(x, rows, dim), reads(weight, dim), writes(y, rows, dim), writes(inv_rms, rows))
/// dx, and dweight += the sum over rows of dy * x * inv_rms. In place: dx may be dy.
WEFT_KERNEL_F32_BF16(rms_norm_backward,
    (const T* dy, const T* x, const float* weight, const float* inv_rms, T* dx, float* dweight,
     std::int64_t rows, std::int64_t dim),
    reads(dy, rows, dim), reads(x, rows, dim), reads(weight, dim), reads(inv_rms, rows),
    writes(dx, rows, dim), updates(dweight, dim))
/// y = (x - mean) * inv_std * weight + bias. mean and inv_std = 1 / sqrt(variance + eps) are over dim, and
/// are kept for the backward pass. The variance is the mean of (x - mean)^2. In place: y may be x.
WEFT_KERNEL_F32_BF16(layer_norm_forward,
    (const T* x, const float* weight, const float* bias, T* y, float* mean, float* inv_std,
     std::int64_t rows, std::int64_t dim, float eps),
    reads(x, rows, dim), reads(weight, dim), reads(bias, dim), writes(y, rows, dim), writes(mean, rows),
    writes(inv_std, rows))
/// dx, dweight += the sum over rows of dy * (x - mean) * inv_std, dbias += the sum of dy's rows. In place: dx
/// may be dy.
WEFT_KERNEL_F32_BF16(layer_norm_backward,
    (const T* dy, const T* x, const float* weight, const float* mean, const float* inv_std, T* dx,
     float* dweight, float* dbias, std::int64_t rows, std::int64_t dim),
    reads(dy, rows, dim), reads(x, rows, dim), reads(weight, dim), reads(mean, rows), reads(inv_std, rows),
    writes(dx, rows, dim), updates(dweight, dim), updates(dbias, dim))
/// Layer norm of maps, over the channels of each pixel. In place: y may be x.
WEFT_KERNEL(channel_norm_forward,
    (const float* x, const float* weight, const float* bias, float* y, float* mean, float* inv_std,
     MapShape s, float eps),
    reads(x, s.elements()), reads(weight, s.channels), reads(bias, s.channels), writes(y, s.elements()),
    writes(mean, s.batch, s.pixels), writes(inv_std, s.batch, s.pixels))
/// dx, dweight +=, dbias +=. In place: dx may be dy.
WEFT_KERNEL(channel_norm_backward,
    (const float* dy, const float* x, const float* weight, const float* mean, const float* inv_std, float* dx,
     float* dweight, float* dbias, MapShape s),
    reads(dy, s.elements()), reads(x, s.elements()), reads(weight, s.channels),
    reads(mean, s.batch, s.pixels), reads(inv_std, s.batch, s.pixels), writes(dx, s.elements()),
    updates(dweight, s.channels), updates(dbias, s.channels))
/// Normalises over each group of channels / groups channels of a sample and all their pixels. In place: y may
/// be x. Throws bad_argument if groups does not divide channels.
WEFT_KERNEL(group_norm_forward,
    (const float* x, const float* weight, const float* bias, float* y, float* mean, float* inv_std,
     MapShape s, std::int64_t groups, float eps),
    reads(x, s.elements()), reads(weight, s.channels), reads(bias, s.channels), writes(y, s.elements()),
    writes(mean, s.batch, groups), writes(inv_std, s.batch, groups))
/// dx, dweight +=, dbias +=. In place: dx may be dy.
WEFT_KERNEL(group_norm_backward,
    (const float* dy, const float* x, const float* weight, const float* mean, const float* inv_std, float* dx,
     float* dweight, float* dbias, MapShape s, std::int64_t groups),
    reads(dy, s.elements()), reads(x, s.elements()), reads(weight, s.channels), reads(mean, s.batch, groups),
    reads(inv_std, s.batch, groups), writes(dx, s.elements()), updates(dweight, s.channels),
    updates(dbias, s.channels))

/// sum = the sum of x over samples and pixels, squares = that of x^2, in f64.
WEFT_KERNEL(channel_moments,
    (const float* x, double* sum, double* squares, MapShape s),
    reads(x, s.elements()), writes(sum, s.channels), writes(squares, s.channels))
/// y = (x - mean) * inv_std * weight + bias, channel by channel. In place: y may be x.
WEFT_KERNEL(batch_norm_forward,
    (const float* x, const float* weight, const float* bias, const float* mean, const float* inv_std,
     float* y, MapShape s),
    reads(x, s.elements()), reads(weight, s.channels), reads(bias, s.channels), reads(mean, s.channels),
    reads(inv_std, s.channels), writes(y, s.elements()))
/// sum_dy = the sum of dy over samples and pixels, sum_dyx = that of dy * (x - mean) * inv_std, in f64.
WEFT_KERNEL(batch_norm_backward_sums,
    (const float* dy, const float* x, const float* mean, const float* inv_std, double* sum_dy,
     double* sum_dyx, MapShape s),
    reads(dy, s.elements()), reads(x, s.elements()), reads(mean, s.channels), reads(inv_std, s.channels),
    writes(sum_dy, s.channels), writes(sum_dyx, s.channels))
/// dx = weight * inv_std * (dy - mean_dy - (x - mean) * inv_std * mean_dyx). In place: dx may be dy.
WEFT_KERNEL(batch_norm_backward,
    (const float* dy, const float* x, const float* weight, const float* mean, const float* inv_std,
     const float* mean_dy, const float* mean_dyx, float* dx, MapShape s),
    reads(dy, s.elements()), reads(x, s.elements()), reads(weight, s.channels), reads(mean, s.channels),
    reads(inv_std, s.channels), reads(mean_dy, s.channels), reads(mean_dyx, s.channels),
    writes(dx, s.elements()))
/// The statistics of a batch norm from the sums of its channels: mean = sum / count, inv_std = 1 /
/// sqrt(variance + eps), where variance = squares / count - mean^2, at least 0. tracked_mean = mean,
/// tracked_var = variance * count / (count - 1). Both of these are null if they are not needed.
WEFT_KERNEL(batch_norm_statistics,
    (const double* sum, const double* squares, double count, double eps, float* mean, float* inv_std,
     double* tracked_mean, double* tracked_var, std::int64_t channels),
    reads(sum, channels), reads(squares, channels), writes(mean, channels), writes(inv_std, channels),
    optional(writes(tracked_mean, channels)), optional(writes(tracked_var, channels)))
/// running = (1 - momentum) running + momentum * tracked / ranks, for both; batches += 1.
WEFT_KERNEL(batch_norm_track,
    (const double* tracked_mean, const double* tracked_var, double ranks, double momentum,
     float* running_mean, float* running_var, std::int64_t* batches, std::int64_t channels),
    reads(tracked_mean, channels), reads(tracked_var, channels), updates(running_mean, channels),
    updates(running_var, channels), updates(batches, 1))
/// inv_std = 1 / sqrt(variance + eps).
WEFT_KERNEL(inverse_std,
    (const float* variance, double eps, float* inv_std, std::int64_t n),
    reads(variance, n), writes(inv_std, n))
/// y = x / divisor, rounded to f32.
WEFT_KERNEL(divide_f64,
    (const double* x, double divisor, float* y, std::int64_t n),
    reads(x, n), writes(y, n))
/// Adds sums of channels to sums of groups of neighbouring channels. y = for each row and group the sum of
/// its channels' x, each multiplied by its weight unless weight is null. groups divides channels.
WEFT_KERNEL(group_sums,
    (const double* x, const float* weight, double* y, std::int64_t rows, std::int64_t channels,
     std::int64_t groups),
    reads(x, rows, channels), optional(reads(weight, channels)), writes(y, rows, groups))
/// The reverse for numbers of groups: y[r][c] = x[r][the group of c].
WEFT_KERNEL(spread_groups,
    (const float* x, float* y, std::int64_t rows, std::int64_t channels, std::int64_t groups),
    reads(x, rows, groups), writes(y, rows, channels))
/// y = the sum over rows of x, rounded to f32.
WEFT_KERNEL(sum_rows_f64,
    (const double* x, float* y, std::int64_t rows, std::int64_t columns),
    reads(x, rows, columns), writes(y, columns))
/// y = (x - mean) * inv_std * weight + bias, with statistics of rows. x may be a part of these rows. In
/// place: y may be x.
WEFT_KERNEL(row_norm_forward,
    (const float* x, const float* weight, const float* bias, const float* mean, const float* inv_std,
     float* y, std::int64_t rows, std::int64_t dim),
    reads(x, rows, dim), reads(weight, dim), reads(bias, dim), reads(mean, rows), reads(inv_std, rows),
    writes(y, rows, dim))
/// With n = (x - mean) * inv_std and g = dy * weight: sum_g, sum_gx = the sums of g and of g n over each row,
/// in f64. dweight += the sum of dy n over rows, dbias += the sum of dy over rows.
WEFT_KERNEL(row_norm_backward_sums,
    (const float* dy, const float* x, const float* weight, const float* mean, const float* inv_std,
     double* sum_g, double* sum_gx, float* dweight, float* dbias, std::int64_t rows, std::int64_t dim),
    reads(dy, rows, dim), reads(x, rows, dim), reads(weight, dim), reads(mean, rows), reads(inv_std, rows),
    writes(sum_g, rows), writes(sum_gx, rows), updates(dweight, dim), updates(dbias, dim))
/// dx = inv_std * (g - mean_g - n * mean_gx). In place: dx may be dy.
WEFT_KERNEL(row_norm_backward,
    (const float* dy, const float* x, const float* weight, const float* mean, const float* inv_std,
     const float* mean_g, const float* mean_gx, float* dx, std::int64_t rows, std::int64_t dim),
    reads(dy, rows, dim), reads(x, rows, dim), reads(weight, dim), reads(mean, rows), reads(inv_std, rows),
    reads(mean_g, rows), reads(mean_gx, rows), writes(dx, rows, dim))

// ---- Maps ----

/// y += bias, channel by channel.
WEFT_KERNEL(add_channel_bias,
    (const float* bias, float* y, MapShape s),
    reads(bias, s.channels), updates(y, s.elements()))
/// dbias += the sum of dy over samples and pixels, made in f64.
WEFT_KERNEL(channel_bias_backward,
    (const float* dy, float* dbias, MapShape s),
    reads(dy, s.elements()), updates(dbias, s.channels))
/// y = x with its dimensions in another order. x: how.in.
WEFT_KERNEL(permute,
    (const float* x, float* y, const Permutation& how),
    reads(x, how.in.count()), writes(y, how.in.count()))
/// columns[c, i, j, r, s] = x[c, r stride + i dilation - padding, and the same for s and j].
WEFT_KERNEL(unfold,
    (const float* x, float* columns, const UnfoldShape& s),
    reads(x, s.in_elements()), writes(columns, s.column_elements()))
/// The adjoint: each pixel of dx is the sum of all elements of columns to which it was copied.
WEFT_KERNEL(fold,
    (const float* dcolumns, float* dx, const UnfoldShape& s),
    reads(dcolumns, s.column_elements()), writes(dx, s.in_elements()))
/// y[m, r, s] = the sum over the taps of row r of weight times (the sum over the taps of column s of weight *
/// x[m, i, j]). An element's bits depend on its own taps and inputs alone.
WEFT_KERNEL(resample,
    (const float* x, float* y, const ResampleShape& s),
    reads(x, s.maps, s.height, s.width), writes(y, s.maps, s.rows->outputs(), s.columns->outputs()))
/// y[c, r, s] = the largest of the pixels that the kernel sees. place[c, r, s] = the place of this pixel, i *
/// kernel_width + j, the first if there are several. A NaN is the largest. Pixels beyond the border do not
/// count. If the kernel sees no pixel, y is -infinity and place is -1.
WEFT_KERNEL(max_pool_forward,
    (const float* x, float* y, std::int32_t* place, const UnfoldShape& s),
    reads(x, s.in_elements()), writes(y, s.out_elements()), writes(place, s.out_elements()))
/// dx[c, i, j] = the sum of the dy whose place is this pixel, in their order. A place beyond the border of dx
/// does not count.
WEFT_KERNEL(max_pool_backward,
    (const float* dy, const std::int32_t* place, float* dx, const UnfoldShape& s),
    reads(dy, s.out_elements()), reads(place, s.out_elements()), writes(dx, s.in_elements()))

// ---- Tokens ----

/// y[t] = table[ids[t] - vocab.first], 0 for an id that is not in the part. Throws bad_argument for an id
/// outside of the whole.
WEFT_KERNEL_F32_BF16(embedding_forward,
    (const std::int64_t* ids, const T* table, float* y, std::int64_t tokens, VocabPart vocab,
     std::int64_t dim),
    reads(ids, tokens), reads(table, vocab.count, dim), writes(y, tokens, dim))
/// dtable[ids[t] - vocab.first] += dy[t], in the order of t, for ids in the part. Throws as forward does.
WEFT_KERNEL(embedding_backward,
    (const std::int64_t* ids, const float* dy, float* dtable, std::int64_t tokens, VocabPart vocab,
     std::int64_t dim),
    reads(ids, tokens), reads(dy, tokens, dim), updates(dtable, vocab.count, dim))
/// Rotates the pair (i, i + head_dim/2) of every head by its position's angle. cosine and sine may have
/// further positions. In place: y may be x.
WEFT_KERNEL_F32_BF16(rope_forward,
    (const T* x, const float* cosine, const float* sine, T* y, RopeShape s),
    reads(x, s.elements()), reads(cosine, s.seq, s.head_dim / 2), reads(sine, s.seq, s.head_dim / 2),
    writes(y, s.elements()))
/// The reverse rotation: dx from dy. In place: dx may be dy.
WEFT_KERNEL_F32_BF16(rope_backward,
    (const T* dy, const float* cosine, const float* sine, T* dx, RopeShape s),
    reads(dy, s.elements()), reads(cosine, s.seq, s.head_dim / 2), reads(sine, s.seq, s.head_dim / 2),
    writes(dx, s.elements()))

// ---- Attention ----

/// Causal attention: out = softmax(q k^T / sqrt(head_dim)) v, where position i sees positions 0..i. softmax:
/// of the scaled scores, kept for the backward pass. Throws bad_argument if kv_heads does not divide heads.
WEFT_KERNEL_F32_BF16(attention_forward,
    (const T* q, const T* k, const T* v, T* out, float* softmax, AttentionShape s),
    reads(q, s.q_elements()), reads(k, s.kv_elements()), reads(v, s.kv_elements()),
    writes(out, s.q_elements()), writes(softmax, s.softmax_elements()))
/// dq, dk, dv from dout and the tensors that the forward pass left.
WEFT_KERNEL_F32_BF16(attention_backward,
    (const T* dout, const T* q, const T* k, const T* v, const T* out,
     const float* softmax, T* dq, T* dk, T* dv, AttentionShape s),
    reads(dout, s.q_elements()), reads(q, s.q_elements()), reads(k, s.kv_elements()),
    reads(v, s.kv_elements()), reads(out, s.q_elements()), reads(softmax, s.softmax_elements()),
    writes(dq, s.q_elements()), writes(dk, s.kv_elements()), writes(dv, s.kv_elements()))
/// out = softmax(q k^T / sqrt(head_dim) + bias) v. Every query sees every key that the bias does not hide.
/// softmax: of the scores with the bias, kept for the backward pass. If a query sees no key, out is 0, the
/// largest score -infinity and the sum 0. Throws bad_argument if kv_heads does not divide heads.
WEFT_KERNEL_F32_BF16(full_attention_forward,
    (const T* q, const T* k, const T* v, ScoreBias bias, T* out, float* softmax,
     FullAttentionShape s),
    reads(q, s.q_elements()), reads(k, s.kv_elements()), reads(v, s.kv_elements()),
    optional(reads(bias, s.batch, s.queries, s.keys)), writes(out, s.q_elements()),
    writes(softmax, s.softmax_elements()))
/// dq, dk, dv and, unless it is null, dbias, the sum over samples and heads, from dout and the results of the
/// forward pass. dbias is only for a bias (queries, keys). For another bias it throws bad_argument.
WEFT_KERNEL_F32_BF16(full_attention_backward,
    (const T* dout, const T* q, const T* k, const T* v, ScoreBias bias, const T* out,
     const float* softmax, T* dq, T* dk, T* dv, float* dbias, FullAttentionShape s),
    reads(dout, s.q_elements()), reads(q, s.q_elements()), reads(k, s.kv_elements()),
    reads(v, s.kv_elements()), optional(reads(bias, s.batch, s.queries, s.keys)), reads(out, s.q_elements()),
    reads(softmax, s.softmax_elements()), writes(dq, s.q_elements()), writes(dk, s.kv_elements()),
    writes(dv, s.kv_elements()), optional(writes(dbias, s.queries, s.keys)))
/// attention_forward() and full_attention_forward() of keys in pieces, for any queries. softmax and out hold
/// the intermediate values between pieces. The piece that `ends` finishes out. bias: of the queries and keys
/// of the piece. Throws bad_argument if kv_heads does not divide heads, or first_key is no multiple of
/// kAttentionKeys.
WEFT_KERNEL(attention_piece_forward,
    (const float* q, const float* k, const float* v, ScoreBias bias, float* out, float* softmax,
     AttentionPiece s),
    reads(q, s.q_elements()), reads(k, s.kv_elements()), reads(v, s.kv_elements()),
    optional(reads(bias, s.batch, s.queries, s.keys)), updates(out, s.q_elements()),
    updates(softmax, s.softmax_elements()))
/// delta = the sum of dout * out over head_dim. s.keys and s.kv_heads are not used.
WEFT_KERNEL(attention_delta,
    (const float* dout, const float* out, float* delta, FullAttentionShape s),
    reads(dout, s.q_elements()), reads(out, s.q_elements()), writes(delta, s.batch, s.heads, s.queries))
/// dq of keys in pieces, for any queries. The piece that `begins` overwrites it, and the others add. Throws
/// as attention_piece_forward does.
WEFT_KERNEL(attention_piece_backward_queries,
    (const float* dout, const float* q, const float* k, const float* v, ScoreBias bias, const float* softmax,
     const float* delta, float* dq, AttentionPiece s),
    reads(dout, s.q_elements()), reads(q, s.q_elements()), reads(k, s.kv_elements()),
    reads(v, s.kv_elements()), optional(reads(bias, s.batch, s.queries, s.keys)),
    reads(softmax, s.softmax_elements()), reads(delta, s.batch, s.heads, s.queries),
    updates(dq, s.q_elements()))
/// dk and dv of queries in pieces, for any keys: the piece that `begins` overwrites them, and the others add.
/// The piece that `begins` sees every key that any query sees. The gradients of other keys become 0. Throws
/// bad_argument if kv_heads does not divide heads, or first_query is no multiple of kAttentionQueries.
WEFT_KERNEL(attention_piece_backward_keys,
    (const float* dout, const float* q, const float* k, const float* v, ScoreBias bias, const float* softmax,
     const float* delta, float* dk, float* dv, AttentionPiece s),
    reads(dout, s.q_elements()), reads(q, s.q_elements()), reads(k, s.kv_elements()),
    reads(v, s.kv_elements()), optional(reads(bias, s.batch, s.queries, s.keys)),
    reads(softmax, s.softmax_elements()), reads(delta, s.batch, s.heads, s.queries),
    updates(dk, s.kv_elements()), updates(dv, s.kv_elements()))
/// full_attention_forward() in two steps, for short sequences, so that a layer can change the weights between
/// them. weights = softmax(q k^T / sqrt(head_dim) + bias), where a bias of -infinity hides a key. Gradients
/// of a query that sees no key are 0.
WEFT_KERNEL(attention_weights_forward,
    (const float* q, const float* k, const float* bias, float* weights, FullAttentionShape s),
    reads(q, s.q_elements()), reads(k, s.kv_elements()), optional(reads(bias, s.queries, s.keys)),
    writes(weights, s.batch, s.heads, s.queries, s.keys))
/// dq, dk and, unless it is null, dbias, the sum over samples and heads.
WEFT_KERNEL(attention_weights_backward,
    (const float* dweights, const float* weights, const float* q, const float* k, float* dq, float* dk,
     float* dbias, FullAttentionShape s),
    reads(dweights, s.batch, s.heads, s.queries, s.keys), reads(weights, s.batch, s.heads, s.queries, s.keys),
    reads(q, s.q_elements()), reads(k, s.kv_elements()), writes(dq, s.q_elements()),
    writes(dk, s.kv_elements()), optional(writes(dbias, s.queries, s.keys)))
/// out = weights v.
WEFT_KERNEL(attention_apply_forward,
    (const float* weights, const float* v, float* out, FullAttentionShape s),
    reads(weights, s.batch, s.heads, s.queries, s.keys), reads(v, s.kv_elements()),
    writes(out, s.q_elements()))
/// dweights and dv from dout.
WEFT_KERNEL(attention_apply_backward,
    (const float* dout, const float* weights, const float* v, float* dweights, float* dv,
     FullAttentionShape s),
    reads(dout, s.q_elements()), reads(weights, s.batch, s.heads, s.queries, s.keys),
    reads(v, s.kv_elements()), writes(dweights, s.batch, s.heads, s.queries, s.keys),
    writes(dv, s.kv_elements()))

// ---- Element by element ----

/// y = x * sigmoid(x). In place: y may be x.
WEFT_KERNEL_F32_BF16(silu_forward, (const T* x, T* y, std::int64_t n), reads(x, n), writes(y, n))
/// dx from dy. In place: dx may be dy.
WEFT_KERNEL_F32_BF16(silu_backward,
    (const T* dy, const T* x, T* dx, std::int64_t n),
    reads(dy, n), reads(x, n), writes(dx, n))
/// y = x Phi(x), where Phi is the distribution of the standard normal; tanh: y = x (1 + tanh(sqrt(2/pi) (x +
/// 0.044715 x^3))) / 2. In place: y may be x. D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", 2016.
WEFT_KERNEL_F32_BF16(gelu_forward,
    (const T* x, T* y, std::int64_t n, GeluForm form),
    reads(x, n), writes(y, n))
/// dx from dy. In place: dx may be dy.
WEFT_KERNEL_F32_BF16(gelu_backward,
    (const T* dy, const T* x, T* dx, std::int64_t n, GeluForm form),
    reads(dy, n), reads(x, n), writes(dx, n))
/// y = x where x > 0, otherwise 0; NaN stays NaN. In place: y may be x.
WEFT_KERNEL_F32_BF16(relu_forward, (const T* x, T* y, std::int64_t n), reads(x, n), writes(y, n))
/// dx = dy where y > 0, otherwise 0. In place: dx may be dy.
WEFT_KERNEL_F32_BF16(relu_backward,
    (const T* dy, const T* y, T* dx, std::int64_t n),
    reads(dy, n), reads(y, n), writes(dx, n))
/// out = silu(gate) * up. In place: out may be gate or up.
WEFT_KERNEL_F32_BF16(swiglu_forward,
    (const T* gate, const T* up, T* out, std::int64_t n),
    reads(gate, n), reads(up, n), writes(out, n))
/// dgate and dup from dout. In place: dgate or dup may be dout, gate or up.
WEFT_KERNEL_F32_BF16(swiglu_backward,
    (const T* dout, const T* gate, const T* up, T* dgate, T* dup, std::int64_t n),
    reads(dout, n), reads(gate, n), reads(up, n), writes(dgate, n), writes(dup, n))
/// out = a + b. In place: out may be a or b.
WEFT_KERNEL_F32_BF16(add,
    (const T* a, const T* b, T* out, std::int64_t n),
    reads(a, n), reads(b, n), writes(out, n))
/// x *= factor.
WEFT_KERNEL(scale, (float* x, float factor, std::int64_t n), updates(x, n))
/// x = value.
WEFT_KERNEL(fill, (float* x, float value, std::int64_t n), writes(x, n))
/// y = x * run.scale where number run.first + i of the stream is at least run.p, otherwise 0. In place: y may
/// be x.
WEFT_KERNEL_F32_BF16(dropout,
    (const T* x, T* y, std::int64_t n, const DropoutRun& run),
    reads(x, n), writes(y, n))
/// y = x, rounded to the nearest bf16.
WEFT_KERNEL(round_to_bf16, (const float* x, bf16* y, std::int64_t n), reads(x, n), writes(y, n))
/// y = x, exactly.
WEFT_KERNEL(widen_bf16, (const bf16* x, float* y, std::int64_t n), reads(x, n), writes(y, n))

// ---- Losses ----

/// The share of one part of the vocabulary in the loss, for each token: the largest logit of the part, the
/// sum of e^(logit - largest) over the part, the target's logit (0 if it is in another part), and the sum of
/// the logits (0 without smoothing). count: as below. Throws bad_argument for a target that is neither in the
/// whole vocabulary nor kIgnoredTarget, and unless count > 0.
WEFT_KERNEL(cross_entropy_terms,
    (const float* logits, const std::int64_t* targets, double* terms, std::int64_t tokens, VocabPart vocab,
     const std::int64_t* count, double smoothing),
    reads(logits, tokens, vocab.count), reads(targets, tokens), writes(terms, tokens, kLossTerms),
    reads(count, 1))
/// loss = the sum over tokens of -(1 - smoothing) log p[target] - smoothing (the mean of log p over the
/// vocabulary) + z_loss (log of the sum of e^logit)², divided by `count`. p = softmax(logits). count: the
/// number of valid tokens of the whole batch, over all ranks. terms: of all parts of the vocabulary, in their
/// order. softmax: kept for the backward pass. vocab: of all parts. Summed in f64. C. Szegedy et al.,
/// Rethinking the Inception Architecture, arXiv:1512.00567, section 7 (smoothing); A. Chowdhery et al., PaLM,
/// arXiv:2204.02311, section 5 (z_loss).
WEFT_KERNEL(cross_entropy_sum,
    (const double* terms, int parts, const std::int64_t* targets, double* softmax, double* loss,
     std::int64_t tokens, std::int64_t vocab, const std::int64_t* count, double smoothing, double z_loss),
    reads(terms, parts, tokens, kLossTerms), reads(targets, tokens), writes(softmax, tokens, kSoftmaxTerms),
    writes(loss, 1), reads(count, 1))
/// dlogits = (softmax(logits) (1 + 2 z_loss log of the sum of e^logit) - (1 - smoothing) onehot(target) -
/// smoothing / vocab.whole) / count, times dloss, or 1 if it is null. Rows of ignored targets are 0. softmax:
/// as cross_entropy_sum gave it. In place: dlogits may be logits. Throws as cross_entropy_terms does.
WEFT_KERNEL(cross_entropy_backward,
    (const float* logits, const std::int64_t* targets, const double* softmax, const double* dloss,
     float* dlogits, std::int64_t tokens, VocabPart vocab, const std::int64_t* count, double smoothing,
     double z_loss),
    reads(logits, tokens, vocab.count), reads(targets, tokens), reads(softmax, tokens, kSoftmaxTerms),
    optional(reads(dloss, 1)), writes(dlogits, tokens, vocab.count), reads(count, 1))
/// count = the number of targets that are not kIgnoredTarget.
WEFT_KERNEL(count_valid,
    (const std::int64_t* targets, std::int64_t* count, std::int64_t n),
    reads(targets, n), writes(count, 1))
/// loss = the sum of the elements' terms in f64, each multiplied by the weight of its row unless weights is
/// null, divided by count. Throws bad_argument for a count below 1. A binary cross entropy also throws it for
/// a target that is not from 0 to 1.
WEFT_KERNEL(element_loss_forward,
    (const float* y, const float* target, const float* weights, double* loss, LossShape s,
     const std::int64_t* count, LossTerm term),
    reads(y, s.n), reads(target, s.n), optional(reads(weights, s.rows)), writes(loss, 1), reads(count, 1))
/// dy of this loss, multiplied by dloss, or by 1 if it is null. dy may be y.
WEFT_KERNEL(element_loss_backward,
    (const float* y, const float* target, const float* weights, const double* dloss, float* dy, LossShape s,
     const std::int64_t* count, LossTerm term),
    reads(y, s.n), reads(target, s.n), optional(reads(weights, s.rows)), optional(reads(dloss, 1)),
    writes(dy, s.n), reads(count, 1))

// ---- Spectral norms and optimizers ----

/// x *= 1 / max(sqrt(squares), eps). squares: the sum of squares of x, or of a whole of which x is a part.
WEFT_KERNEL(normalise,
    (float* x, const double* squares, double eps, std::int64_t n),
    updates(x, n), reads(squares, 1))
/// x *= 1 / sigma; if inner is not null, x *= -inner / sigma^2. Throws bad_argument for a sigma that is 0 or
/// not finite.
WEFT_KERNEL(spectral_divide,
    (float* x, const float* sigma, const float* inner, std::int64_t n),
    updates(x, n), reads(sigma, 1), optional(reads(inner, 1)))
/// to = from if sigma is a finite number other than 0. Otherwise `to` does not change.
WEFT_KERNEL(spectral_keep,
    (const float* from, const float* sigma, float* to, std::int64_t n),
    reads(from, n), reads(sigma, 1), updates(to, n))
/// sum = the sum of x^2 in f64.
WEFT_KERNEL(sum_of_squares,
    (const float* x, double* sum, std::int64_t n),
    reads(x, n), writes(sum, 1))
/// One step of AdamW with the gradient g.
WEFT_KERNEL(adamw_step,
    (float* p, float* m, float* v, const float* g, std::int64_t n, const AdamWStep& s),
    updates(p, n), updates(m, n), updates(v, n), reads(g, n))
/// One step of SGD with the gradient g. With momentum 0 velocity is not used and may be null. Velocity starts
/// as zeros.
WEFT_KERNEL(sgd_step,
    (float* p, float* velocity, const float* g, std::int64_t n, const SgdStep& s),
    updates(p, n), optional(updates(velocity, n)), reads(g, n))
/// One step of Lion with the gradient g.
WEFT_KERNEL(lion_step,
    (float* p, float* m, const float* g, std::int64_t n, const LionStep& s),
    updates(p, n), updates(m, n), reads(g, n))
/// One step of schedule-free AdamW with the gradient g.
WEFT_KERNEL(schedule_free_step,
    (float* y, float* z, float* v, const float* g, std::int64_t n, const ScheduleFreeStep& s),
    updates(y, n), updates(z, n), updates(v, n), reads(g, n))

#undef WEFT_KERNEL
#undef WEFT_KERNEL_F32_BF16
