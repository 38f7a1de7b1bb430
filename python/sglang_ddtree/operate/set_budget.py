"""`set-budget`: change budget and cap of a running unit; put back what does not start."""

from __future__ import annotations

import contextlib
import io
import time
from typing import Annotated

import requests
import typer

from sglang_ddtree.operate import unit as units
from sglang_ddtree.operate.terminal import console, refuse
from sglang_ddtree.operate.unit import OperateError, Unit


def check_arguments(arguments: list[str]) -> None:
    """Lets the server's own checks look at its arguments, so that a bad one is refused before anything is drained.

    Raises OperateError with the server's one line.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):  # SGLang's import warnings are of no use here
            from sglang.srt.plugins import load_plugins

            load_plugins()
            from sglang.srt.server_args import prepare_server_args

            prepare_server_args(arguments)
    except SystemExit:
        lines = [line for line in said.getvalue().splitlines() if "error: " in line]
        raise OperateError(lines[-1].partition("error: ")[2] if lines else said.getvalue()[-500:]) from None
    except Exception as e:
        raise OperateError(f"sglang serve refuses these settings: {e}") from e


def apply(unit: Unit, budget: int, cap: int | None, *, check: bool = True) -> dict:
    """Changes the unit and returns {budget, cap, restarted, seconds}; on return the server serves with the new values.

    cap: None keeps the present one. Raises OperateError; the settings are then as they were, and so is the server where
    it could be brought back.
    """
    old_text = unit.text()
    old = units.parse(old_text, unit.path)
    changes = {"DDTREE_BUDGET": budget, "DDTREE_CAP": old["DDTREE_CAP"] if cap is None else cap}
    new_text = units.edit(old_text, changes)
    new = units.parse(new_text, unit.path)
    if check:
        check_arguments(units.arguments(new))
    report = {"budget": budget, "cap": int(new["DDTREE_CAP"]), "restarted": False, "seconds": 0.0}
    runs = unit.show("ActiveState") not in ("inactive", "failed")
    if runs:
        with contextlib.suppress(requests.RequestException):  # one that hangs may be restarted
            unit.server_info(old)  # a key that is refused is refused here, not after the drain
    unit.replace(new_text)
    if not runs:
        return report
    started = time.monotonic()
    try:
        _restart(unit, new)
    except (OperateError, KeyboardInterrupt) as e:
        raise OperateError(f"{str(e) or 'interrupted'}; {_roll_back(unit, old_text, old)}") from None
    return report | {"restarted": True, "seconds": time.monotonic() - started}


def _restart(unit: Unit, settings: dict[str, str]) -> None:
    """Drains, stops, starts, and asks the new server for its budget and cap. Raises OperateError."""
    unit.systemctl("reset-failed")  # systemd's limit of starts is for crashes; this one is wanted
    if not unit.systemctl("restart"):
        result = unit.show("Result")
        raise OperateError(
            f"{unit.service} did not come up ({result}; see: journalctl -u {unit.service} -n 50)"
        )
    try:
        info = unit.server_info(settings)
    except requests.RequestException as e:
        raise OperateError(f"{unit.service} is up but {units.url(settings)} does not answer: {e}") from e
    for field, key in (("budget", "DDTREE_BUDGET"), ("topk_cap", "DDTREE_CAP")):
        serves = info.get(f"speculative_ddtree_{field}")
        if str(serves) != settings[key]:
            raise OperateError(
                f"{units.url(settings)} serves {field} {serves}, not {settings[key]}: "
                "DDTREE_FLAGS or a drop-in overrides it, or another server has the port"
            )


def _roll_back(unit: Unit, text: str, settings: dict[str, str]) -> str:
    try:
        unit.replace(text)
    except OperateError as e:
        return f"the new settings are still there: {e}"
    try:
        _restart(unit, settings)
    except OperateError as e:
        return f"the old settings are back in {unit.path}, but {e}"
    return f"rolled back: it serves with budget {settings['DDTREE_BUDGET']} and cap {settings['DDTREE_CAP']} again"


def set_budget(
    name: Annotated[str, typer.Argument(metavar="NAME", help="the instance: sglang-ddtree@NAME")],
    budget: Annotated[int, typer.Option(min=1, help="draft nodes beside the root")],
    cap: Annotated[int | None, typer.Option(min=1, help="candidates per depth; left out: unchanged")] = None,
) -> None:
    """Change budget and cap of a service: check, drain, restart, wait until it serves; roll back if it does not."""
    try:
        unit = Unit(name)
        with unit.lock():
            done = apply(unit, budget, cap)
    except OperateError as e:
        raise refuse(e) from None
    what = f"{unit.service}: budget {done['budget']}, cap {done['cap']}"
    if done["restarted"]:
        console.print(f"{what}, serving again after {done['seconds']:.0f} s")
    else:
        console.print(f"{what} in {unit.path}; it is not running (systemctl start {unit.service})")
