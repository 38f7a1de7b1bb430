"""Refuses requests that would end the scheduler, and so every request of the server, instead of being answered.

Stock SGLang 0.5.17 has a check of token ids that nothing calls, and none of how many log-probs are asked for nor of
a bias that fp32 cannot hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_ddtree.server_args import is_ddtree

FP32_MAX = 3.4028234e38

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


def validate_one_request(
    manager: TokenizerManager, obj: GenerateReqInput | EmbeddingReqInput, input_ids: list[int] | None
) -> None:
    """Hook before SGLang validates a request. Raises ValueError, which SGLang answers with status 400."""
    if not is_ddtree(manager.server_args):
        return
    if input_ids is not None and not input_ids and not getattr(obj, "input_embeds", None):
        raise ValueError("input_ids: a prompt cannot be empty; give at least one token.")
    size = manager.model_config.vocab_size
    for wrong in (min(input_ids), max(input_ids)) if input_ids else ():  # 33,000 ids take under a millisecond
        if not 0 <= wrong < size:
            raise ValueError(
                f"The prompt has token id {wrong}, outside the vocabulary (0 to {size - 1}); "
                "encode it with this model's tokenizer."
            )
    wanted = getattr(obj, "top_logprobs_num", None) or 0
    if wanted > size:
        raise ValueError(
            f"logprobs (top_logprobs_num): {wanted} is more than the vocabulary's {size}; ask for fewer."
        )
    for token, bias in (obj.sampling_params.get("logit_bias") or {}).items():
        if not abs(float(bias)) <= FP32_MAX:
            raise ValueError(f"logit_bias: {bias} of token {token} is not a finite fp32 number; use less.")
