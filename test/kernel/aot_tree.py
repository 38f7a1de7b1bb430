"""Compiles the tree kernels for chips that need not be present; Triton's interpreter must be off.

Prints a JSON line per compilation: name, arch, shared (bytes), spills (bytes stored), registers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from sglang_ddtree_kernel import (
    _build_tree_triton,
    _topk_logprobs_triton,
    _tree_attention_triton,
    accept_tree,
    compact_kv,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHES = (90, 100, 120)
FLOATS = {"bf16": 2, "fp32": 4}


def compile_for(kernel, signature, constexprs, arch: int, num_warps: int, num_stages: int) -> dict:
    """signature: types of the arguments that are no constants; "16" behind a colon says a multiple of 16."""
    types, attrs = {}, {}
    for i, name in enumerate(kernel.arg_names):
        kind = signature.get(name, "constexpr")
        types[name] = kind.split(":")[0]
        if kind.endswith(":16") or kind.startswith("*"):
            attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, types, constexprs, attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        target = re.search(r"\.target (\S+)", compiled.asm["ptx"])[1].rstrip(",")
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        ptxas = tools / ("ptxas-blackwell" if arch >= 100 else "ptxas")
        command = [ptxas, "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "shared": compiled.metadata.shared,
        "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log)),
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
    }


def attention_cases(arch: int):
    names = (
        "part_out:*fp32 part_lse:*fp32 scale:fp32 logit_cap:fp32 num_rows:i32 group:i32 req_pool_indices:*i64"
    )
    names += " seq_lens:*i64 tree_slots:*i64 ancestors:*i64 req_to_token:*i32"
    base = dict(name.split(":") for name in names.split())
    base |= {
        f"stride_{x}": "i32:16" for x in ("q_row", "q_head", "k_slot", "k_head", "v_slot", "v_head", "req")
    }
    for dtype, itemsize in FLOATS.items():
        for d in (64, 128, 256):
            tiles = {
                _tree_attention_triton.pick_tile(arch, d, itemsize, m) for m in (1, 16, 17, 64, 65, 384, 4096)
            }
            for tile in sorted(tiles):
                constexprs = {
                    "KV_HEADS": 4,
                    "CAPPED": d == 128,
                    "DTYPE": getattr(triton.language, {"bf16": "bfloat16", "fp32": "float32"}[dtype]),
                    "PRECISION": "tf32x3" if dtype == "fp32" else "tf32",
                    "D": d,
                    "DV": d,
                    "BLOCK_D": d,
                    "BLOCK_DV": d,
                    "BLOCK_M": tile.block_m,
                    "BLOCK_N": tile.block_n,
                    "WORDS": 1,
                    "MIN_BLOCKS": 4,
                }
                signature = base | {x: f"*{dtype}" for x in ("q", "k_pool", "v_pool")}
                yield (
                    f"tree_attention {dtype} d{d} {tuple(tile)}",
                    _tree_attention_triton._split_kernel,
                    signature,
                    constexprs,
                    tile.num_warps,
                    tile.num_stages,
                )
            signature = {"part_out": "*fp32", "part_lse": "*fp32", "out": f"*{dtype}"}
            signature |= {"parts": "i32"}
            constexprs = {"DV": d, "BLOCK_DV": d, "PARTS": 32}
            yield (
                f"attention merge {dtype} d{d}",
                _tree_attention_triton._merge_kernel,
                signature,
                constexprs,
                4,
                3,
            )


def topk_cases():
    module = _topk_logprobs_triton
    for dtype, itemsize in FLOATS.items():
        names = "vocab:i32:16 row_stride:i32:16 vocab_offset:i32 num_blocks:i32"
        common = {"logits": f"*{dtype}"} | dict(name.split(":", 1) for name in names.split())
        signature = common | {"group_max_out": f"*{dtype}", "block_max_out": f"*{dtype}"}
        signature |= {"block_lse_out": "*fp32"}
        vector = 16 // itemsize
        constexprs = {"ALIGNED": True, "GROUP": module.GROUP, "STEPS": module.STEPS}
        constexprs |= {"LANES": module.LANES, "VECTOR": vector}
        yield f"topk pass {dtype}", module._pass_kernel, signature, constexprs, 1, 3
        block_groups = module.STEPS * module.LANES * vector // module.GROUP
        for k in (1, 8, 32):
            signature = common | {"group_max": f"*{dtype}", "block_max": f"*{dtype}", "block_lse": "*fp32"}
            signature |= {"values_out": "*fp32", "ids_out": "*i64", "lse_out": "*fp32"}
            constexprs = {"K": k, "K_PAD": k, "GROUP": module.GROUP, "BLOCK_GROUPS": block_groups}
            constexprs |= {"BLOCKS": 2048 // vector}
            yield f"topk search {dtype} k{k}", module._search_kernel, signature, constexprs, 1, 3
    for k, shards in ((8, 8), (32, 8)):
        signature = {x: "*fp32" for x in ("values", "lse", "logprobs_out")}
        signature |= {"ids": "*i64", "ids_out": "*i64", "shards": "i32"}
        constexprs = {"K": k, "K_PAD": k, "SHARDS": shards}
        yield f"topk merge k{k}", module._merge_kernel, signature, constexprs, 1, 3


def tree_cases():
    names = "logprobs:*fp32 ids:*i64 root_tokens:*i64 tokens_out:*i64 parents_out:*i32 depths_out:*i32"
    names += " ancestors_out:*i64 counts_out:*i32 num_rows:i32 horizon:i32 width:i32"
    signature = dict(name.split(":") for name in names.split())
    for rows in (16, 128, 512):
        for flags in ((False, False), (True, True)):
            constexprs = {
                "CONDITIONED": flags[0],
                "SPINE": flags[1],
                "ROWS": rows,
                "WIDTH": 32,
                "WORDS": rows // 64 or 1,
            }
            yield (
                f"build_tree rows{rows} {flags}",
                _build_tree_triton._build_kernel,
                signature,
                constexprs,
                1,
                3,
            )
        names = "tokens:*i64 parents:*i32 targets:*i64 slots:*i64 rows_out:*i32 lens_out:*i32 tokens_out:*i64"
        names += " bonus_out:*i64 src_out:*i64 dst_out:*i64 num_rows:i32 width:i32"
        accept = dict(name.split(":") for name in names.split())
        constexprs = {"HAS_SLOTS": True, "ROWS": rows}
        yield f"accept_tree rows{rows}", accept_tree._accept_kernel, accept, constexprs, 1, 3
    for moves, columns in ((16, 256), (512, 8), (compact_kv.MAX_MOVES, 1)):
        signature = {"table": "*i64", "dst": "*i64", "src": "*i64", "num_moves": "i32"}
        constexprs = {"WORD": triton.language.int64, "MOVES": moves, "COLUMNS": columns}
        yield f"compact_kv {moves} moves", compact_kv._compact_kernel, signature, constexprs, 8, 3


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    for arch in ARCHES:
        for name, kernel, signature, constexprs, warps, stages in (
            *topk_cases(),
            *tree_cases(),
            *attention_cases(arch),
        ):
            if wanted in name:
                result = compile_for(kernel, signature, constexprs, arch, warps, stages)
                print(json.dumps({"name": name, "arch": arch, **result}), flush=True)
