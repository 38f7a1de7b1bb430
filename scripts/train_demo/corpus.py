"""Python source found in installed packages: which files, cleaned how, and under which licences."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import sysconfig
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

HELD_OUT = ("networkx", "sympy")  # whole packages that no training step sees
SKIPPED_TOPS = ("test", "lib2to3", "idlelib", "encodings", "__pycache__")
PERMISSIVE = re.compile(
    r"apache|\bmit\b|bsd|\bisc\b|psf|python software|python-2\.0|zlib|unlicense|hpnd|mpl|mozilla|cc0|public domain",
    re.IGNORECASE,
)
RESTRICTED = re.compile(r"gpl|affero|gnu |proprietary|nvidia|commercial", re.IGNORECASE)
NOTICE = re.compile(r"copyright|licen[sc]e|spdx|all rights reserved", re.IGNORECASE)
MIN_CHARS, MAX_CHARS = 300, 200_000
MAX_LINE = 90  # mean characters per line
MAX_DIGITS = 0.25
MIN_ZLIB_RATIO = 0.15  # below it a file is mostly a table or one pattern repeated
MIN_NEW_LINES = 0.4  # share of long lines first seen in this file; below it the file is a near copy
LONG_LINE = 20


@dataclass(frozen=True)
class Source:
    """One cleaned file."""

    origin: str  # path below its root, e.g. networkx/algorithms/dag.py
    text: str

    @property
    def top(self) -> str:
        """Top-level package or module."""
        return self.origin.split("/")[0].removesuffix(".py")


def roots() -> list[Path]:
    """site-packages and the standard library."""
    import torch

    paths = sysconfig.get_paths()
    found = {Path(paths[k]).resolve() for k in ("purelib", "platlib", "stdlib")}
    return sorted(found | {Path(torch.__file__).resolve().parents[1]})


def permissive_packages() -> dict[str, str]:
    """Top-level names of installed packages under a permissive licence, with that licence in a few words."""
    licences = {}
    for top, names in importlib.metadata.packages_distributions().items():
        meta = importlib.metadata.metadata(names[0])
        classifiers = [c for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
        stated = [meta.get("License-Expression") or "", (meta.get("License") or "")[:200], *classifiers]
        text = " ".join(stated)
        if PERMISSIVE.search(text) and not RESTRICTED.search(text):
            short = min(
                (line for s in stated for line in s.splitlines() if PERMISSIVE.search(line)),
                key=len,
                default=text,
            )
            licences[top] = short.split(" :: ")[-1].strip()
    return licences


def find_files(only: tuple[str, ...] | None = None) -> tuple[list[tuple[Path, str]], dict[str, str]]:
    """Sorted (path, origin) of candidate files, and the licences of the packages they belong to."""
    licences, files, found_roots = permissive_packages(), [], roots()
    stdlib = Path(sysconfig.get_paths()["stdlib"]).resolve()
    for root in found_roots:
        for folder, subfolders, names in os.walk(root):
            below = os.path.relpath(folder, root)
            top = below.split("/")[0]
            subfolders[:] = sorted(
                d
                for d in subfolders
                if d not in ("__pycache__", "site-packages", "dist-packages")
                and not (below == "." and d in SKIPPED_TOPS)
            )
            for name in sorted(names):
                package = top if below != "." else name.removesuffix(".py")
                if not name.endswith(".py") or (only is not None and package not in only):
                    continue
                if root == stdlib:
                    licences.setdefault(package, "PSF-2.0")
                elif package not in licences:
                    continue
                files.append((Path(folder) / name, os.path.normpath(f"{below}/{name}")))
    return files, licences


def strip_notice(text: str) -> str:
    """Without the leading comment block if that is a copyright or licence notice."""
    lines = text.split("\n")
    end = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    return "\n".join(lines[end:]) if NOTICE.search("\n".join(lines[:end])) else text


def clean(path: Path) -> str | None:
    """The file's text, or None where it teaches little: tiny, huge, data, one pattern repeated."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    text = strip_notice(text.replace("\r\n", "\n"))
    if not MIN_CHARS < len(text) < MAX_CHARS or len(text) / (text.count("\n") + 1) > MAX_LINE:
        return None
    head = text[:4000]
    if sum(c.isdigit() for c in head) > MAX_DIGITS * len(head):
        return None
    raw = text.encode()
    return text if len(zlib.compress(raw, 1)) > MIN_ZLIB_RATIO * len(raw) else None


def _read(files: list[tuple[Path, str]]) -> list[tuple[str, str, np.ndarray]]:
    """(origin, text, hashes of its long lines) of the files worth keeping."""
    kept = []
    for path, origin in files:
        text = clean(path)
        if text is not None:
            lines = {line.strip() for line in text.split("\n")}
            hashes = [zlib.crc32(x.encode()) | (len(x) & 0xFF) << 32 for x in lines if len(x) >= LONG_LINE]
            kept.append((origin, text, np.array(hashes, dtype=np.int64)))
    return kept


def collect(workers: int, only: tuple[str, ...] | None = None, limit: int | None = None):
    """Cleaned and deduplicated sources in a fixed order, held-out packages first, and their licences by package.

    A file is dropped if an earlier one has the same text or most of its long lines; since held-out files come first,
    no near copy of one is trained on.
    """
    files, licences = find_files(only)
    if limit is not None:
        held = [f for f in files if f[1].split("/")[0] in HELD_OUT]
        others = [f for f in files if f[1].split("/")[0] not in HELD_OUT]
        files = held[:limit] + others[:: max(1, len(others) // limit)]
    batches = [files[i : i + 64] for i in range(0, len(files), 64)]
    if workers > 1:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            read = [item for batch in pool.map(_read, batches) for item in batch]
    else:
        read = [item for batch in batches for item in _read(batch)]
    read.sort(key=lambda item: (item[0].split("/")[0] not in HELD_OUT, item[0]))

    all_hashes = np.concatenate([h for *_, h in read]) if read else np.zeros(0, np.int64)
    first_seen = np.zeros(len(all_hashes), bool)
    first_seen[np.unique(all_hashes, return_index=True)[1]] = True
    kept, texts, at = [], set(), 0
    for origin, text, hashes in read:
        new = first_seen[at : at + len(hashes)]
        at += len(hashes)
        digest = hashlib.md5(text.encode()).digest()
        if digest not in texts and (len(new) == 0 or new.mean() >= MIN_NEW_LINES):
            texts.add(digest)
            kept.append(Source(origin, text))
    return kept, {s.top: licences.get(s.top, "") for s in kept}
