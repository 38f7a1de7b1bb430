"""The algorithm DDTREE as SGLang's scheduler sees it: a member of the DFLASH family whose verify forward is a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ddtree.server_args import ALGORITHM, DDTreeConfigError, check_backends, check_pair, is_ddtree

if TYPE_CHECKING:
    from sglang_ddtree.server_args import DDTreeServerArgs


class DDTreeAlgorithm(CustomSpecAlgo):
    """DFLASH's capture of target features, KV accounting and decode preparation, with a tree to verify."""

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        """Draft KV shares the target's slots, so no pages of its own are reserved."""
        return False

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(
        self, device, req_to_token_pool, needs_cpu_seq_lens=True, needs_confidence_relay=False
    ):
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        from sglang.srt.runtime_context import get_server_args

        args = get_server_args()
        return args.speculative_dflash_block_size if is_draft_worker else args.speculative_ddtree_budget + 1

    def handle_server_args(self, server_args: DDTreeServerArgs) -> None:
        """Resolves the speculative fields; raises DDTreeConfigError on a pair or flag that cannot be served.

        `speculative_num_draft_tokens` is what SGLang reserves per request and step, so it must hold both the draft
        block (block_size rows) and the tree (budget + 1 rows).
        """
        from sglang.srt.arg_groups import speculative_hook

        check_backends(server_args)
        draft = check_pair(server_args)
        speculative_hook._handle_dflash(server_args)
        server_args.speculative_dflash_block_size = draft.block_size
        width = max(server_args.speculative_ddtree_budget + 1, draft.block_size)
        server_args.speculative_num_draft_tokens = width
        if server_args.mamba_track_interval < width:
            raise DDTreeConfigError(
                f"--mamba-track-interval: {server_args.mamba_track_interval} is below the {width} rows of one step; "
                "use at least that"
            )


def validate_request(original, req, enable_overlap: bool) -> str | None:
    """Hook around DFLASH's admission check: the message of a refused request, or None."""
    from sglang.srt.runtime_context import get_server_args

    if not is_ddtree(get_server_args()):
        return original(req, enable_overlap)
    if req.return_hidden_states:
        return "return_hidden_states is not supported with DDTREE; leave it out"
    return None


def register() -> None:
    """Registers DDTREE with SGLang. Call once a process."""

    @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=DDTreeAlgorithm)
    def _worker_class(server_args):
        from sglang_ddtree.worker import DDTreeWorker

        return DDTreeWorker
