"""The site's search finds the page that answers what users ask."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Browser

from tests.control.observe.browser import PATIENCE_MS, browsers, needs_chromium
from tests.integration.built_site import opened

pytestmark = needs_chromium

FIELD = "input.md-search__input"

QUESTIONS = {
    "install": ["install"],
    "pip install CUDA": ["install"],
    "python version": ["install"],
    "first steps": ["tutorials/quickstart"],
    "hello world actor": ["tutorials/quickstart", "tutorials/first_actors"],
    "call an actor": ["howto/call_actors"],
    "actor class": ["howto/write_actors"],
    "spawn processes": ["howto/start_processes"],
    "stop actor": ["howto/stop_actors"],
    "slice mesh": ["howto/slice_meshes"],
    "stream results": ["howto/stream_results"],
    "rank died": ["howto/replace_ranks", "howto/handle_failures"],
    "process killed": ["howto/replace_processes", "tutorials/surviving_failures"],
    "supervise": ["howto/handle_failures", "explanation/supervision"],
    "restart policy": ["howto/recover"],
    "SupervisionError": ["reference/errors", "howto/handle_failures"],
    "BufferDroppedError": ["reference/errors"],
    "timeout": ["reference/settings", "reference/failures"],
    "serve metrics": ["howto/export_metrics"],
    "prometheus": ["howto/export_metrics"],
    "job hangs": ["howto/take_stacks", "tutorials/find_a_hang"],
    "stack traces": ["howto/take_stacks"],
    "dashboard": ["howto/use_dashboard"],
    "print output of actors": ["howto/read_output"],
    "pdb breakpoint": ["howto/debug_actors"],
    "slurm": ["howto/use_slurm"],
    "kubernetes": ["howto/use_kubernetes"],
    "multiple machines": ["tutorials/several_hosts", "howto/attach_hosts"],
    "TLS certificates": ["howto/secure_hosts"],
    "torchrun": ["howto/run_torchrun_code", "howto/use_torchrun"],
    "publish weights": ["howto/publish_weights"],
    "weight sync vLLM": ["howto/sync_vllm"],
    "FSDP to tensor parallel": ["howto/use_dtensor", "howto/publish_from_ranks"],
    "LoRA": ["howto/sync_lora"],
    "quantize fp8": ["howto/quantize_weights"],
    "shared memory between processes": ["howto/share_memory"],
    "RDMA": ["howto/use_verbs", "howto/share_memory"],
    "GPU memory": ["howto/use_gpu_memory"],
    "checkpoint": ["howto/checkpoint_training", "howto/checkpoint_mesh"],
    "compare with Ray": ["choose", "reference/from_ray"],
    "benchmark results": ["performance"],
    "load balancing replicas": ["howto/services"],
    "rename weights": ["howto/rename_weights"],
    "fuse qkv": ["howto/rename_weights", "howto/load_by_plan"],
    "load_weights": ["howto/load_by_plan"],
    "zero copy weights": ["howto/publish_in_place"],
    "checksum": ["howto/check_transfers"],
    "background weight update": ["howto/sync_without_pause"],
    "weights to S3": ["howto/mirror_weights"],
    "replicate weights": ["howto/keep_copies"],
    "verl": ["howto/sync_verl"],
    "TRL": ["howto/sync_trl"],
    "Ray cluster": ["howto/use_ray"],
    "ssh": ["howto/use_ssh"],
    "join job": ["howto/join_jobs"],
    "sync code": ["howto/sync_code"],
    "simulate many hosts": ["howto/try_scale"],
    "restart processes": ["howto/recover"],
    "replica died": ["howto/survive_replica_loss"],
    "rolling update": ["howto/update_services"],
    "backpressure": ["howto/limit_messages"],
    "grpc client": ["howto/call_from_other_languages"],
    "mypy": ["howto/type_actors"],
    "OpenTelemetry": ["howto/trace_calls"],
    "progress bar": ["howto/show_progress"],
    "atomic counter": ["howto/use_atomics"],
    "UCX": ["howto/use_ucx"],
    "all-reduce": ["howto/reduce_and_move"],
    "DTensor": ["howto/use_dtensor"],
    "torch.compile": ["howto/compile_steps"],
    "random seed": ["howto/seed_random_numbers"],
    "doctor": ["howto/examine_machine"],
}
"""What a user types, and the pages one of which must come first: the best one in front."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from browsers()


@pytest.fixture(scope="module")
def first(browser: Browser, site: Path) -> Iterator[Callable[[str], str]]:
    """Types a question into the search field of the home page; returns the first page that is offered."""
    links = "a.md-search-result__link"
    with opened(browser, site / "index.html") as page:
        page.set_default_timeout(PATIENCE_MS)

        def type_in(text: str) -> None:
            page.fill(FIELD, text)
            page.press(FIELD, "End")  # the search looks at the field when a key is released

        def ask(question: str) -> str:
            type_in("")
            page.wait_for_function(f"document.querySelector({links!r}) === null")
            type_in(question)
            page.wait_for_selector(links, state="attached")
            address = page.eval_on_selector(links, "link => link.href")
            path = unquote(urlsplit(str(address)).path)
            return os.path.relpath(path, site).removesuffix(".html")

        yield ask


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_right_page_is_found_first(question: str, first: Callable[[str], str]) -> None:
    assert first(question) in QUESTIONS[question]


def test_there_are_forty_questions_and_their_pages_exist(site: Path) -> None:
    assert len(QUESTIONS) >= 40
    for question, pages in QUESTIONS.items():
        assert [page for page in pages if not (site / f"{page}.html").exists()] == [], question
