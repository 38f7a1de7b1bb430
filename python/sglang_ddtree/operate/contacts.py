"""The rows of the hook table for those who operate a server: the port, refused prompts, draining, metrics."""

from __future__ import annotations

from sglang_ddtree.hooks import Contact, S

D = "sglang_ddtree.operate.drain."
M = "sglang_ddtree.metrics."
T = S + "managers.tokenizer_manager.TokenizerManager."

OPERATE_CONTACTS: tuple[Contact, ...] = (
    Contact(
        S + "entrypoints.http_server.launch_server",
        "server_args init_tokenizer_manager_func run_scheduler_process_func run_detokenizer_process_func "
        "execute_warmup_func launch_callback",
        "tries its port after loading, and never ends where it is taken",
        "before",
        "sglang_ddtree.operate.port.launch_server",
    ),
    Contact(
        S + "entrypoints.http_server._setup_and_run_http_server",
        "server_args tokenizer_manager template_manager port_args scheduler_infos subprocess_watchdog "
        "execute_warmup_func launch_callback",
        "adds the gate that refuses requests while draining; tells systemd",
        "before",
        D + "setup_http_server",
    ),
    Contact(
        T + "_validate_one_request",
        "self obj input_ids",
        "refuses what would end the scheduler: token ids outside the vocabulary, too many log-probs",
        "before",
        "sglang_ddtree.operate.admission.validate_one_request",
    ),
    Contact(T + "sigterm_watchdog", "self", "drains without a limit", "around", D + "sigterm_watchdog"),
    Contact(T + "auto_create_handle_loop", "self", "SIGTERM is handled from the first second of HTTP on"),
    Contact(T + "abort_request", "self rid abort_all", "ends what is left at the limit"),
    Contact(T + "_dispatch_to_scheduler", "self obj", "the schedulers leave by themselves"),
    Contact(
        S + "utils.cudacore_pyspy_dump_utils.collect_scheduler_processes",
        "",
        "waits for the schedulers",
    ),
    Contact(
        S + "utils.kill_process_tree",
        "parent_pid include_parent skip_pid wait_timeout",
        "ends the children",
    ),
    Contact(
        S + "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
        "._resolve_spec_v2_tokens",
        "self result batch",
        "what a step accepted, on the host",
        "around",
        M + "resolve_tokens",
    ),
    Contact(
        S + "managers.scheduler.Scheduler.get_internal_state",
        "self recv_req",
        "counts in /server_info",
        "after",
        M + "internal_state",
    ),
    Contact(
        T + "_calculate_spec_decoding_metrics",
        "self meta_info recv_obj i",
        "takes the reserved width for the budget",
        "after",
        M + "request_metrics",
    ),
)
