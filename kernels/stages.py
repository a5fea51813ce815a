"""The stage of each kernel: a table without imports, for what reads traces where there is no GPU library."""

INPUT_DIST = "input_dist"
EMBEDDING_FORWARD = "embedding_forward"
DENSE = "dense_forward_backward"
EMBEDDING_BACKWARD = "embedding_backward"
DENSE_UPDATE = "dense_update"
STAGES = (INPUT_DIST, EMBEDDING_FORWARD, DENSE, EMBEDDING_BACKWARD, DENSE_UPDATE)
"""The five stages of an iteration, in order."""

KERNELS: dict[str, tuple[str, str | None]] = {
    "_fetch_next_kernel": ("fetch", INPUT_DIST),
    "_gather_segments_kernel": ("gather_segments", INPUT_DIST),
    "_push_segments_kernel": ("push_segments", INPUT_DIST),
    "_count_picks_kernel": ("pick_rows", INPUT_DIST),
    "_write_picks_kernel": ("pick_rows", INPUT_DIST),
    "_rest_of_picks_kernel": ("pick_rows", INPUT_DIST),
    "sort_ids_count": ("sort_ids", INPUT_DIST),
    "sort_ids_pass": ("sort_ids", INPUT_DIST),
    "_regroup_kernel": ("regroup", None),
    "_regroup_sum_kernel": ("regroup", EMBEDDING_FORWARD),
    "_cross_forward_kernel": ("cross", DENSE),
    "_cross_backward_kernel": ("cross", DENSE),
    "_cross_output_backward_kernel": ("cross", DENSE),
    "fused_cross": ("fused_cross", DENSE),
    "fp8_product": ("fp8", DENSE),
    "fp8_copies": ("fp8_copies", DENSE),
    "fp8_weights": ("fp8_weights", DENSE),
    "_small_mlp_kernel": ("small_mlp", DENSE),
    "_bias_relu_backward_kernel": ("mlp", DENSE),
    "_silu_attention_forward_kernel": ("silu_attention", DENSE),
    "_silu_attention_query_backward_kernel": ("silu_attention", DENSE),
    "_silu_attention_key_backward_kernel": ("silu_attention", DENSE),
    "silu_attention": ("silu_attention", DENSE),
    "silu_attention_items": ("silu_attention_items", DENSE),
    "_last_query_forward_kernel": ("last_query_attention", DENSE),
    "_last_query_backward_kernel": ("last_query_attention", DENSE),
    "_last_query_sum_kernel": ("last_query_attention", DENSE),
    "_norm_forward_kernel": ("norm", DENSE),
    "_norm_backward_kernel": ("norm", DENSE),
    "_gated_norm_forward_kernel": ("gated_norm", DENSE),
    "_gated_norm_backward_kernel": ("gated_norm", DENSE),
    "_token_input_forward_kernel": ("token_input", DENSE),
    "_token_input_backward_kernel": ("token_input", DENSE),
    "_sorted_sums_kernel": ("sorted_sums", DENSE),
    "_sorted_sums_merge_kernel": ("sorted_sums", DENSE),
    "_zero_tail_kernel": ("zero_tail", DENSE),
    "_column_sums_kernel": ("column_sums", DENSE),
    "_logit_loss_backward_kernel": ("loss", DENSE),
    "_add_up_kernel": ("loss", DENSE),
    "_raise_flag_kernel": ("non_finite", DENSE),
    "_clear_gradients_kernel": ("non_finite", EMBEDDING_BACKWARD),
    "_clear_together_kernel": ("non_finite", DENSE_UPDATE),
    "_row_sums_kernel": ("row_sums", EMBEDDING_BACKWARD),
    "_sorted_adagrad_kernel": ("sorted_adagrad", EMBEDDING_BACKWARD),
    "sorted_adagrad": ("sorted_adagrad", EMBEDDING_BACKWARD),
    "_sorted_adagrad_merge_kernel": ("sorted_adagrad", EMBEDDING_BACKWARD),
    "_flat_adagrad_kernel": ("flat_adagrad", DENSE_UPDATE),
    "_sharded_adagrad_kernel": ("sharded_adagrad", DENSE_UPDATE),
    "sharded_adagrad": ("sharded_adagrad", DENSE_UPDATE),
    "_peer_sums_kernel": ("peer_sums", DENSE_UPDATE),
    "_pooled_lookup_kernel": ("pooled_lookup", EMBEDDING_FORWARD),
    "_push_columns_kernel": ("push_columns", EMBEDDING_BACKWARD),
}
"""Function of a kernel, by which traces name it: (module in a folder of kernels/, stage). The stage is
None where several stages launch the kernel."""
