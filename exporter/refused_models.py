"""Models that were looked at, and why they are not exported."""

from __future__ import annotations

# model type -> the rest of a sentence that starts with it
REASONS = {
    **dict.fromkeys(("zamba", "zamba2"), "uses a block of weights in several layers, and engines would hold it once for each"),
    **dict.fromkeys(
        ("dory", "hrm_text", "inkling2_loop_text"),
        "goes through layers several times for each token, which no schedule describes",
    ),
    **dict.fromkeys(
        ("deepseek_v4", "glm5_next_text", "hy_v4", "hy_v4_vl_text"), "mixes several streams of each token anew in every layer"
    ),
    **dict.fromkeys(("inkling_text", "inkling2_text"), "convolves the keys and values of its attention"),
    **dict.fromkeys(("rwkv", "xlstm"), "has a recurrence of its own, for which there is no operator"),
    "diffllama": "subtracts one attention from another",
    "doge": "adds numbers to its attention's scores that it computes from the values",
    "jetmoe": "has a mixture of experts in its attention",
    "longcat_flash": "has two attentions in each layer, and a KV buffer holds the keys of one",
    "minimax": "has lightning attention, which is not traced",
    "minimax_m3_vl_text": "attends to blocks of tokens that it chooses",
    "mllama_text_model": "has layers that attend to images alone",
    "qwen4_exp_text": "attends to blocks of tokens that it chooses, and looks up runs of tokens in its layers",
    "voxtral_realtime_text": "computes with the delay of what it hears",
    "zaya": "convolves the queries and keys of its attention",
}
