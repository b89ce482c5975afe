"""How much a page counts in the site's search, by its kind, and words that users type for what a page calls otherwise.

A page that says how to do something comes before an exact description, and both before lists that name everything.
MkDocs calls the function below. The words are tags of the page in the index; `assets/site.css` does not show them.
"""

from __future__ import annotations

import re
from typing import Any

from mkdocs.structure.pages import Page

RANKS = {
    "index.md": 1.0,
    "choose.md": 2.5,
    "install.md": 3.0,
    "performance.md": 2.0,
    "tutorials/": 2.0,
    "howto/compare_runs.md": 0.8,
    "howto/examine_machine.md": 0.8,
    "howto/measure_bandwidth.md": 0.8,
    "howto/measure_jobs.md": 0.8,
    "howto/write_benchmarks.md": 0.8,
    "howto/": 2.5,
    "explanation/memory_order.md": 0.4,
    "explanation/measured_changes.md": 0.6,
    "explanation/": 1.0,
    "reference/errors.md": 0.1,  # names of errors begin with words of other pages
    "reference/skipper.": 0.3,
    "reference/control_files.md": 0.2,
    "reference/glossary.md": 0.5,
    "reference/from_": 0.6,
    "reference/": 0.8,
    "extending/": 0.4,
    "contributing/": 0.2,
    "repository/": 0.2,
    "wire_protocol.md": 0.3,
    "benchmarks.md": 0.8,
    "cli.md": 0.6,
}
"""By the path of a page, or how it begins; the first that fits counts. Others have 1."""

WORDS = {
    "choose.md": ["compare with Ray", "comparison"],
    "howto/attach_hosts.md": ["multiple machines", "cluster", "multi-node"],
    "howto/call_actors.md": ["call an actor", "remote call"],
    "howto/call_from_other_languages.md": ["gRPC client", "JavaScript"],
    "howto/check_transfers.md": ["checksum", "data corruption"],
    "howto/compile_steps.md": ["torch.compile"],
    "howto/examine_machine.md": ["doctor"],
    "howto/handle_failures.md": ["supervise", "SupervisionError", "crash"],
    "howto/inspect_jobs.md": ["status"],
    "howto/join_jobs.md": ["join job"],
    "howto/keep_copies.md": ["replicate weights", "redundancy"],
    "howto/limit_messages.md": ["backpressure", "flow control"],
    "howto/load_by_plan.md": ["load_weights"],
    "howto/mirror_weights.md": ["weights to S3", "object store"],
    "howto/publish_in_place.md": ["zero copy weights", "direct mode"],
    "howto/publish_weights.md": ["publish weights"],
    "howto/recover.md": ["restart processes"],
    "howto/reduce_and_move.md": ["all-reduce", "all-gather"],
    "howto/rename_weights.md": ["rename weights", "fuse qkv"],
    "howto/replace_processes.md": ["process killed"],
    "howto/replace_ranks.md": ["rank died"],
    "howto/run_torchrun_code.md": ["torchrun"],
    "howto/seed_random_numbers.md": ["random seed"],
    "howto/services.md": ["load balancing", "replicas"],
    "howto/show_progress.md": ["progress bar"],
    "howto/start_processes.md": ["spawn processes"],
    "howto/survive_replica_loss.md": ["replica died"],
    "howto/sync_code.md": ["sync code", "copy files"],
    "howto/sync_vllm.md": ["weight sync vLLM", "engine"],
    "howto/sync_without_pause.md": ["background weight update"],
    "howto/take_stacks.md": ["job hangs", "stack traces", "stuck"],
    "howto/trace_calls.md": ["OpenTelemetry", "tracing"],
    "howto/try_scale.md": ["simulate many hosts"],
    "howto/type_actors.md": ["mypy", "type checker"],
    "howto/update_services.md": ["rolling update"],
    "howto/use_atomics.md": ["atomic counter"],
    "howto/use_dashboard.md": ["dashboard"],
    "install.md": ["Python version", "pip", "CUDA", "wheel"],
    "performance.md": ["benchmark results", "speed"],
    "reference/settings.md": ["timeout", "configuration"],
    "tutorials/quickstart.md": ["first steps", "getting started", "hello world"],
    "tutorials/several_hosts.md": ["multiple machines"],
    "tutorials/surviving_failures.md": ["process killed", "crash"],
}
"""By the path of a page."""

ERRORS = "reference/errors.md"
"""The page that is found by the name of any error that it explains."""

_ERROR = re.compile(r"`([A-Z]\w+Error)`")


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Rank a page, and add the words that it is looked for by."""
    uri = page.file.src_uri
    rank = next((rank for begin, rank in RANKS.items() if uri.startswith(begin)), 1.0)
    page.meta["search"] = {"boost": rank}
    words = WORDS.get(uri, [])
    if uri == ERRORS:
        words = sorted(set(_ERROR.findall(markdown)))
    if words:
        page.meta["tags"] = words
    return markdown
