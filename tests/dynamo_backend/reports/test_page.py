"""Reports as pages: what they hold, what a browser makes of them, and two of them side by side."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch

import torch_mlc
from torch_mlc.dynamo_backend.reports.model_report import Report

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), "")
in_browser = pytest.mark.skipif(not BROWSER, reason="no Chromium is installed here")
Seen = Callable[..., str]


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = torch.softmax(torch.relu(x) @ w, -1)  # </script><b>not markup</b> <!-- nor a comment
    return torch.nn.functional.gelu(h) @ w.t()


@pytest.fixture(scope="module")
def report() -> Report:
    return torch_mlc.explain(model, torch.randn(48, 64), torch.randn(64, 100))


@pytest.fixture
def seen(tmp_path: Path) -> Seen:
    """What a browser makes of a page, as HTML, with its messages; at an address with a state."""

    def look(told: object, **state: str) -> str:
        page = tmp_path / "page.html"
        told.save(page)  # type: ignore[attr-defined]
        words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--log-level=0"]
        words += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000", "--dump-dom"]
        done = subprocess.run(
            [*words, f"{page.as_uri()}#{urlencode(state)}"], capture_output=True, text=True, timeout=120, check=True
        )
        errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert not errors, errors
        return done.stdout

    return look


def rows(html: str) -> list[str]:
    """The keys of the rows that are shown, in order."""
    found = re.findall(r'<tr class="(row[^"]*)"[^>]*data-key="([^"]*)"', html)
    return [key for classes, key in found if "hidden" not in classes]


def body(html: str) -> str:
    """The page as a reader sees it: no data, no script, no markup."""
    html = re.sub(r"<(script|style|noscript).*?</\1>", "", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_page_asks_nobody_for_anything(report: Report) -> None:
    page = report.to_html()
    outside = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert {*re.findall(r"https?://[^\"' )]+", outside)} == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"\b(?:src|href|@import|url\()\s*=?", outside)


def test_texts_of_the_model_are_no_markup(report: Report) -> None:
    """A line of the model may hold anything; the data end where they should."""
    page = report.to_html()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None and "not markup" in json.dumps(json.loads(data[1]))
    assert "<b>not markup" not in page.replace(data[0], "")


def test_json_has_every_kernel_and_call(report: Report) -> None:
    (graph,) = json.loads(report.to_json())["graphs"]
    kernels = {k["name"]: k for k in graph["kernels"]}
    assert [*kernels] == [k.name for k in report.kernels]
    assert graph["launches"] == report.graphs[0].launches
    for k in report.kernels:
        told = kernels[k.name]
        assert k.traffic is not None
        assert (told["moved"], told["source"], told["schedule"]) == (k.traffic.moved, k.source, k.schedule)
    assert {c["name"] for c in graph["calls"]} == {*kernels, *(c["name"] for c in graph["libraries"])}


def test_a_gpus_kernels_have_times_and_resources() -> None:
    report = torch_mlc.explain(model, torch.randn(48, 64), torch.randn(64, 100), target="cuda:sm_90")
    (graph,) = json.loads(report.to_json())["graphs"]
    assert graph["kernels"] and all(k["seconds"] > 0 and k["bound"] for k in graph["kernels"])
    assert all(k["resources"]["registers"] > 0 for k in graph["kernels"])
    assert all(c["seconds"] > 0 for c in graph["libraries"])


@pytest.mark.parametrize("name", ("r.html", "r.json", "r.txt", "R.HTML"))
def test_the_ending_says_what_is_written(report: Report, name: str, tmp_path: Path) -> None:
    report.save(tmp_path / name)
    text = (tmp_path / name).read_text()
    assert {".html": "<!doctype html>", ".json": "{", ".txt": "graph for cpu"}[Path(name).suffix.lower()] in text[:400]
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_another_ending_is_refused_with_those_there_are(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.html, \.json, \.txt; 'report\.pdf' ends with none"):
        report.save(tmp_path / "report.pdf")
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_is_not_there_is_an_error_and_leaves_nothing(report: Report, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        report.save(tmp_path / "no" / "report.html")
    assert not [*tmp_path.iterdir()]


def test_a_report_is_short_in_a_shell_and_a_frame_in_a_notebook(report: Report) -> None:
    assert repr(report) == "<Report: 1 graph, 2 launches of 2 kernels, 2 library calls; print it, or save it as a page>"
    frame = report._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and "<script" not in frame


# --- in a browser -----------------------------------------------------------------------------------------------------


@in_browser
def test_the_first_screen_says_what_runs(report: Report, seen: Seen) -> None:
    html = seen(report)
    text = body(html)
    assert "One run starts 2 kernels and makes 2 library calls." in text
    shares = [float(s) for s in re.findall(r"([\d.]+) %", text)]
    assert len(shares) == 3 and shares == sorted(shares, reverse=True) and 98 < sum(shares) < 102
    assert "What runs, the most expensive first" in text and "relu" in text and "softmax" in text
    assert html.count('class="box ') == 4


@in_browser
def test_operations_have_names_that_people_say(seen: Seen) -> None:
    """What PyTorch calls them inside is told where a row is opened; an op of the user's keeps its name."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
    report = torch_mlc.explain(net, torch.randn(2, 3, 16, 16), training=True)
    texts = [body(seen(report, graph=str(k))).partition("In which order")[0] for k in range(2)]
    assert "batch_norm" in texts[0] and "gradient of convolution" in texts[1] and "gradient of batch_norm" in texts[1]
    for text in texts:
        assert not re.findall(r"native_|_backward|with_indices|aten|::|\.default", text), text
    kernel = next(k for k in report.graphs[0].kernels if "batch_norm" in k.name)
    assert ", ".join(kernel.ops) in body(seen(report, open=kernel.name))
    assert len(rows(seen(report, q="gradient of batch_norm", graph="1"))) >= 1


@in_browser
def test_an_operation_of_the_users_keeps_its_name(seen: Seen) -> None:
    with torch.library._scoped_library("mlc_page", "DEF") as library:
        library.define("mm_backward(Tensor x) -> Tensor")
        library.impl("mm_backward", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("mlc_page::mm_backward", torch.empty_like, lib=library)
        report = torch_mlc.explain(lambda x: torch.ops.mlc_page.mm_backward(x) + 1, torch.randn(300))
        assert "mlc_page::mm_backward" in body(seen(report))


@in_browser
def test_a_search_leaves_what_it_finds(report: Report, seen: Seen) -> None:
    everything = rows(seen(report))
    assert len(everything) == 3
    assert rows(seen(report, q="RELU_0")) == [k.name for k in report.kernels if k.name.endswith("relu_0")]
    assert rows(seen(report, q="nothing of that name")) == []


@in_browser
def test_a_row_opens_to_its_code(report: Report, seen: Seen) -> None:
    kernel = report.kernels[-1]
    text = body(seen(report, open=kernel.name))
    assert "What it computes" in text and "Source (llvm)" in text and "rule " + kernel.rule in text
    assert "What it computes" not in body(seen(report))


@in_browser
def test_light_and_dark(report: Report, seen: Seen) -> None:
    assert 'data-theme="dark"' in seen(report, theme="dark")
    assert 'data-theme="light"' in seen(report, theme="light")


@in_browser
def test_several_graphs_and_why_there_are_several(seen: Seen) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        print(end="")
        return torch.exp(y)

    report = torch_mlc.explain(broken, torch.randn(300))
    assert len(report.graphs) == 2
    first, second = body(seen(report, graph="0")), body(seen(report, graph="1"))
    assert "The model is in several graphs" in first and "graph 2 of 2" in first
    assert "exp" in second and rows(seen(report, graph="1")) == [k.name for k in report.graphs[1].kernels]


@in_browser
def test_a_model_without_a_graph(seen: Seen) -> None:
    assert "nothing was compiled" in body(seen(torch_mlc.explain(lambda: 1)))


# --- two reports ------------------------------------------------------------------------------------------------------


def test_a_report_is_the_same_as_itself(report: Report) -> None:
    same = torch_mlc.compare(report, report)
    assert not same.graphs[0].changes and "0 of 2 kernels differ" in str(same)
    assert all(f.ratio in (1, None) for f in same.graphs[0].figures)


def test_what_changed_is_told_kernel_by_kernel(report: Report) -> None:
    def other(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(x) @ w, -1).sum(0)

    changed = torch_mlc.compare(report, torch_mlc.explain(other, torch.randn(48, 64), torch.randn(64, 100)))
    kinds = {c.kind: c.name for c in changed.graphs[0].kernels}
    assert "relu" in kinds["same"] and "gone" in kinds
    figures = {f.name: (f.first, f.second) for f in changed.graphs[0].figures}
    assert figures["library calls"] == (2, 1)


def test_another_schedule_is_a_diff(report: Report) -> None:
    schedules = {report.kernels[0].workload: torch_mlc.Schedule(report.kernels[0].nest).trace}
    plain = torch_mlc.explain(
        model, torch.randn(48, 64), torch.randn(64, 100), options={"schedules": schedules}
    )  # fmt: skip
    (change,) = torch_mlc.compare(report, plain).graphs[0].changes
    assert "has another schedule" in change.what and any(line.startswith("-") for line in change.schedule)


def test_graphs_of_one_report_alone_are_named(report: Report) -> None:
    nothing = torch_mlc.explain(lambda: 1)
    assert torch_mlc.compare(report, nothing).only == (f"the first: {report.graphs[0].name}",)
    assert torch_mlc.compare(nothing, report).only == (f"the second: {report.graphs[0].name}",)


@in_browser
def test_a_comparison_is_a_page(report: Report, seen: Seen) -> None:
    other = torch_mlc.explain(model, torch.randn(48, 64), torch.randn(64, 101))
    text = body(seen(torch_mlc.compare(report, other)))
    assert "Two reports compared" in text and "of 2 differ" in text and "read and written" in text


@in_browser
def test_a_little_more_time_to_compile_is_neither_good_nor_bad(report: Report, seen: Seen) -> None:
    """Clocks differ from run to run by more; bytes do not."""
    slower = [replace(g, times={n: 1.1 * s for n, s in g.times.items()}) for g in report.graphs]
    html = seen(torch_mlc.compare(report, replace(report, graphs=tuple(slower))))
    assert "1.100" in html and not re.findall(r'class="number (good|bad)"', html)
    slower = [replace(g, times={n: 2 * s for n, s in g.times.items()}) for g in report.graphs]
    html = seen(torch_mlc.compare(report, replace(report, graphs=tuple(slower))))
    assert re.findall(r'class="number (good|bad)"', html) == ["bad"]
