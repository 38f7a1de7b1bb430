"""A prompt given as token ids is refused where one lies outside the vocabulary.

Stock SGLang 0.5.17 has a check of its own that nothing calls: such an id reaches the embedding, fails there (on a
GPU as a device-side assertion) and takes the scheduler, and so every request of the server, with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_ddtree.server_args import is_ddtree

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


def validate_one_request(
    manager: TokenizerManager, obj: GenerateReqInput | EmbeddingReqInput, input_ids: list[int] | None
) -> None:
    """Hook before SGLang validates a request. Raises ValueError, which SGLang answers with status 400."""
    if not input_ids or not is_ddtree(manager.server_args):
        return
    size = manager.model_config.vocab_size
    for wrong in (min(input_ids), max(input_ids)):  # at C speed: 33,000 ids take under a millisecond
        if not 0 <= wrong < size:
            raise ValueError(
                f"The prompt has token id {wrong}, outside the vocabulary (0 to {size - 1}); "
                "encode it with this model's tokenizer."
            )
