"""The report of real run folders: self-contained, escaped, and honest about what is missing."""

import base64
import hashlib
import math
import re
from dataclasses import fields
from html.parser import HTMLParser

import pytest
from bokeh.resources import Resources

from mrl.algorithms.base import resolve
from mrl.checkpoint.run_dir.manifest import FileRecord, Manifest
from mrl.config.config import AlgorithmConfig
from mrl.errors import UserError
from mrl.observability.report import write_report
from tests.observability.folders import logging, metrics_of, row, run_steps

VOID = {"meta", "br"}
BOKEH = Resources(mode="inline", components=["bokeh"]).js_raw[0]


class Page(HTMLParser):
    """Checks nesting while reading; keeps tags, attributes and the text."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.text = [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)

    @property
    def words(self):
        return " ".join(self.text)

    def figures(self):
        return [attrs["aria-label"] for _, attrs in self.tags if "data-chart" in attrs]


@pytest.fixture
def whole(tmp_path):
    with logging(tmp_path / "my run", warm_start=2, num_steps=6, actor={"lr": 0.25}) as (run, log):
        for step in (1, 2):
            log.warm_start(step, {"actor/loss": 3.0 / step, "timing_s/step": 0.5})
        log.evaluation(0, {"val/accuracy": 0.125})
        log.samples(0, [row(prompt="1+2=", response="early", reward=0.0)])
        run_steps(log, 1, 6)
        log.note("checkpoint written")
    return run


def test_the_page_says_what_happened(whole):
    assert write_report(whole.root) == whole.report
    page = Page(whole.report)
    words = page.words
    for word in (
        "my run", "grpo", "1 rank on cpu", "0.125 → ", "0.750", "finished", "0:03", "early", "answer of step 6",
        "actor.lr", "0.25", "1e-06", "torch", "checkpoint written", "update_actor", "refit/bytes_moved",
    ):  # fmt: skip
        assert word in words, word
    for title in (
        "Reward",
        "Held-out accuracy",
        "Response length, tokens",
        "Entropy, nats",
        "loss",
        "Time per step, s",
    ):
        assert title in page.figures(), title


def test_a_metric_that_does_not_move_is_written_and_one_that_moves_is_drawn(tmp_path):
    with logging(tmp_path, num_steps=4) as (run, log):
        for step in range(1, 5):
            log.step(step, metrics_of(step) | {"actor/lr": 0.5, "response/abort_ratio": step / 8})
    page = Page(write_report(run.root))
    assert "actor/lr 0.5" in " ".join(page.words.split()) and "actor/lr" not in page.figures()
    assert "response/abort_ratio" in page.figures()


def test_time_counts_the_warm_start(whole):
    words = Page(write_report(whole.root)).words
    # two warm-start steps of 0.5 s; six steps of 0.35 s, of which 0.2 s sampling
    assert "warm start 0:01 32.3 % 0.5 0.5" in " ".join(words.split())
    assert "gen 0:01 38.7 % 0.2 0.2" in " ".join(words.split())


def test_a_run_that_ended_in_its_warm_start_says_where_the_time_went(tmp_path):
    with logging(tmp_path, warm_start=2) as (run, log):
        log.warm_start(1, {"actor/loss": 3.0, "timing_s/step": 0.5})
    page = Page(write_report(run.root))
    assert "warm start 0:00 100.0 % 0.5 0.5" in " ".join(page.words.split())


def test_the_best_step_without_a_checkpoint_is_told(whole):
    assert "whose checkpoint was not kept" in Page(write_report(whole.root)).words
    commit = whole.checkpoints / "step-00000006" / "commit.json"
    commit.parent.mkdir(parents=True)
    commit.write_bytes(Manifest(6, None, {"state.json": FileRecord(0, "0" * 64)}).encode())
    assert "checkpoint was not kept" not in Page(write_report(whole.root)).words


@pytest.mark.slow
def test_settings_changed_on_resume_have_a_heading(tmp_path):
    with logging(tmp_path, num_steps=2) as (run, log):
        run_steps(log, 1, 1)
    assert "Settings changed on resume" not in Page(write_report(run.root)).words
    with logging(tmp_path, num_steps=2, resume_step=1, actor={"lr": 0.5}) as (run, log):
        run_steps(log, 2, 2)
    words = Page(write_report(run.root)).words
    assert "Settings changed on resume" in words and "actor.lr: 1e-06 -> 0.5" in words


def test_what_the_algorithm_fills_in_is_no_difference(tmp_path):
    made = resolve(AlgorithmConfig(name="dapo", clip_low=0.125))
    filled = {item.name: getattr(made, item.name) for item in fields(made)}
    with logging(tmp_path, num_steps=1, algorithm=filled) as (run, log):
        run_steps(log, 1, 1)
    words = Page(write_report(run.root)).words
    assert "algorithm.name" in words and "algorithm.clip_low" in words
    assert "algorithm.clip_high" not in words and "algorithm.dynamic_sampling" not in words


def test_nothing_is_loaded_from_outside_and_only_two_scripts_may_run(whole):
    """A policy of the page, which browsers keep, names the scripts by their hashes and no host."""
    text = write_report(whole.root).read_text(encoding="utf-8")
    page = Page(whole.report)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    assert not {"src", "href", "action", "xlink:href"} & {name for _, attrs in page.tags for name in attrs}
    own = text.replace(BOKEH, "")
    assert len(text) - len(own) == len(BOKEH)
    for word in ("http://", "https://", "//cdn", "@import", "url(", "fetch(", "XMLHttpRequest", "import("):
        assert word not in own, word
    (policy,) = [attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    scripts = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert rules == {
        "default-src": "'none'", "style-src": "'unsafe-inline'", "img-src": "data:",
        "script-src": " ".join(f"'sha256-{value}'" for value in hashes),
    }  # fmt: skip
    assert scripts[0] == BOKEH and len(scripts) == 2


def test_model_output_is_never_markup(tmp_path):
    hostile = "</td></table></script><script>alert(1)</script><img src=x onerror=alert(2)> & \" ' \x1b[2J\x00 \ud800"
    with logging(tmp_path / "<b>run", data={"task": hostile[:-2]}) as (run, log):
        log.samples(0, [row(prompt=hostile, response=hostile, answer=hostile)])
        log.step(1, metrics_of(1) | {f"critic/{hostile}": 1.0})
        log.note(hostile)
    page = Page(write_report(run.root))
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert not any(tag in ("img", "b") and attrs for tag, attrs in page.tags)
    assert page.words.count("</script><script>alert(1)</script><img src=x onerror=alert(2)>") >= 5
    assert "\x1b" not in page.words
    assert "\x00" not in page.words


def test_a_run_that_was_killed_has_a_report(whole):
    for path in (whole.metrics, whole.timings, whole.samples, whole.notes):
        path.write_bytes(path.read_bytes()[:-7])
    whole.run_info.write_text("{")
    whole.config.unlink()
    page = Page(write_report(whole.root))
    assert "answer of step 5" in page.words  # the last line of samples.jsonl was step 6
    assert "0.125 → " in page.words


def test_a_run_in_its_warm_start_has_a_report(tmp_path):
    with logging(tmp_path, warm_start=2) as (run, log):
        log.warm_start(1, {"actor/loss": 3.0})
        log.warm_start(2, {"actor/loss": math.nan})
    page = Page(write_report(run.root))
    assert "of 4" in page.words
    assert "1 values are not finite" in page.words


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not a folder\. Give a run folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(UserError, match="contains no metrics"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "ph')
    with pytest.raises(UserError, match="contains no metrics"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"rubbish\n")
    with pytest.raises(UserError, match="line 1 is not a JSON object"):
        write_report(tmp_path)


def test_each_of_several_data_sets_has_its_line(tmp_path):
    with logging(tmp_path / "run", num_steps=2) as (run, log):
        for step in (1, 2):
            for source, value in (("openai/gsm8k", 0.25), ("<math>", 0.5)):
                log.step(step, {f"train/{source}/reward/mean": value * step})
                log.evaluation(step, {f"val-core/{source}/reward/mean@1": value})
    page = Page(write_report(run.root))
    assert "By data set" in page.words and "openai/gsm8k" in page.words and "<math>" in page.words
    assert {"Held out, mean over the samples", "Reward"} <= set(page.figures())


def test_one_data_set_needs_no_section(tmp_path):
    with logging(tmp_path / "run", num_steps=1) as (run, log):
        log.step(1, {"train/a/reward/mean": 1.0, "critic/score/mean": 1.0})
        log.evaluation(1, {"val-core/a/reward/mean@1": 0.5})
    assert "By data set" not in Page(write_report(run.root)).words


@pytest.mark.slow
def test_ages_and_the_distance_to_what_sampled_are_drawn_where_they_are_logged(tmp_path, whole):
    write_report(whole.root)
    assert not [name for name in Page(whole.report).figures() if "token" in name and "taleness" in name]
    ages = {
        "training/off_policy/trajectory_staleness_worst/max": 2.0,
        "training/off_policy/trajectory_staleness_worst/mean": 1.5,
        "training/off_policy/trajectory_staleness/mean": 1.0,
        "training/off_policy/trajectory_spans/max": 2.0,
        "training/off_policy/long_response_staleness": 1.75,
        "training/off_policy/short_response_staleness": 1.25,
        "rollout/num_carried_groups": 3.0,
        "rollout/num_restarted_groups": 0.0,
        "rollout/accepted_at_once/quarter_1": 0.9,
        "rollout/accepted_at_once/quarter_2": 0.8,
        "rollout/accepted_at_once/quarter_3": 0.7,
        "rollout/accepted_at_once/quarter_4": 0.3,
        "rollout/accepted_mean_length": 20.5,
        "rollout/begun_mean_length": 21.5,
        "rollout_corr/kl": 0.01,
    }
    with logging(tmp_path / "run", num_steps=2) as (run, log):
        for step in (1, 2):
            log.step(step, metrics_of(step) | ages)
    write_report(run.root)
    page = Page(run.report)
    titles = ("Staleness of the samples, steps", "Mean staleness of the oldest token by response length, steps",
              "Policy versions per response", "Groups", "KL(engine, actor), nats",
              "Samples trained by the step that requested them, fraction by length",
              "Mean length over the run, tokens")  # fmt: skip
    assert [title for title in titles if title not in page.figures()] == []
    assert "oldest token, max" in page.words and not [name for name in page.figures() if name in ages]


@pytest.mark.parametrize("gen_s", [0.2, 0.3])
def test_phases_that_ran_beside_each_other_are_told(gen_s, tmp_path):
    with logging(tmp_path / "run", num_steps=2) as (run, log):
        log.step(1, metrics_of(1) | {"timing_s/gen": gen_s})
    write_report(run.root)
    assert ("worked concurrently" in Page(run.report).words) == (gen_s == 0.3)


@pytest.mark.slow
def test_episodes_are_told_turn_by_turn_and_what_was_observed_stands_apart(tmp_path):
    turns = [
        {"by": "policy", "text": "is it <4>?", "tokens": 5, "reward": 0.25},
        {"by": "environment", "text": "higher", "tokens": 2, "reward": None},
        {"by": "policy", "text": "5", "tokens": 2, "reward": 0.0},
    ]
    with logging(tmp_path / "talks") as (run, log):
        log.samples(1, [row("train", response="is it <4>?#higher5#", turns=turns)])
        for step in range(1, 5):
            told = {"num_turns/mean": 1.0 + step, "num_turns/max": 6.0, "episode/finished_frac": step / 4}
            log.step(step, metrics_of(step) | told)
    write_report(run.root)
    page = Page(run.report)
    assert {"Policy turns per episode", "End reasons of episodes, fraction"} <= set(page.figures())
    assert "Tool calls per episode" not in page.figures()
    assert [attrs["class"] for tag, attrs in page.tags if tag == "p" and attrs.get("class") in ("said", "seen")] == [
        "said", "seen", "said",
    ]  # fmt: skip
    said = [text.strip() for text in page.text if text.strip() in ("is it <4>?  [0.25]", "higher", "5")]
    assert said == ["is it <4>?  [0.25]", "higher", "5"]


def test_before_and_after_show_only_prompts_that_both_have(tmp_path):
    with logging(tmp_path, num_steps=2) as (run, log):
        log.samples(0, [row(prompt="dropped", response="gone"), row(prompt="both", response="early")])
        log.samples(1, [row(prompt="other", response="middle")])
        run_steps(log, 1, 1)
        log.samples(2, [row(prompt="both", response="late"), row(prompt="new", response="fresh")])
    words = Page(write_report(run.root)).words
    assert "Samples before and after" in words and "after step 0" in words and "after step 2" in words
    assert "early" in words and "late" in words
    for word in ("gone", "middle", "fresh"):
        assert word not in words, word


def test_samples_of_one_evaluation_are_not_called_before_and_after(tmp_path):
    with logging(tmp_path, num_steps=2) as (run, log):
        log.step(1, metrics_of(1))
        log.samples(1, [row(prompt="old")])
        log.samples(2, [row(prompt="changed")])
    words = Page(write_report(run.root)).words
    assert "Samples before and after" not in words and "changed" in words


def test_each_cell_has_its_head_for_narrow_screens(whole):
    page = Page(write_report(whole.root))
    heads = [attrs.get("data-head") for tag, attrs in page.tags if tag == "td"]
    for head in ("prompt", "expected", "after step 6", "reward", "phase", "share", "key", "this run"):
        assert head in heads, head
