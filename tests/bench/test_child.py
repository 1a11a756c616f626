"""Workers that fail in every way they can: each is a line, ends in bounded time, and leaves no process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bmoe.bench.child import Child, SideFailed
from bmoe.bench.result import Settings
from bmoe.bench.run import Bench
from bmoe.bench.sides import Side

READ = "import sys, json, os, time, signal; request = json.loads(sys.stdin.readline())\n"
SAY = "def say(**event): print(json.dumps(event), flush=True)\n"
MEASURE = """
say(event='opened')
n = request['tokens']
say(event='measured', prompt_ids=[1], n_vocab=9, given=False, tokens=[1], choices=[1], logits_sha256='x', open_s=1.0,
    prefill_s=1.0, peak_rss_bytes=None, warmup_s=[], decode_s=[0.1] * n, read_wait_s=[None] * n, manage_s=[None] * n,
    hits=[None] * n, lookups=[None] * n, bytes=[None] * n, evictions=[None] * n, majflt=[None] * n, run={})
"""


def program(code):
    return (sys.executable, "-c", READ + SAY + code)


def ask(code, silence=30.0):
    child = Child({"tokens": 1}, silence_s=silence, program=program(code))
    try:
        with child:
            return child.measured()
    finally:
        assert not Path(f"/proc/{child.pid}").exists()


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        ("sys.exit(3)", "exit", "the process ended with 3"),
        ("print('no room', file=sys.stderr); sys.exit(7)", "exit", "the process ended with 7: no room"),
        ("os.kill(os.getpid(), 9)", "killed", "was killed (SIGKILL), as is done when memory is short"),
        ("os.kill(os.getpid(), 6)", "signal", "the process was ended by SIGABRT"),
        ("print('GGML_ASSERT', file=sys.stderr, flush=True); os.abort()", "signal", "SIGABRT: GGML_ASSERT"),
        ("say(event='failed', kind='ModelError', reason='m.gguf: no such file')", "ModelError", "m.gguf: no such file"),
        ("print('hello')", "protocol", "wrote what is no answer: b'hello'"),
        ("print('[1]')", "protocol", "wrote what is no answer"),
        ("print('{}')", "protocol", "wrote what is no answer"),
        ("os.write(1, b'\\xff\\n')", "protocol", "wrote what is no answer"),
        ("os.close(1); time.sleep(60)", "protocol", "the process closed its output and went on"),
        ("say(event='opened')", "exit", "the process ended with 0"),
        ("time.sleep(60)", "timeout", "said nothing for 1 s and was ended; raise --timeout"),
        ("say(event='opened'); time.sleep(60)", "timeout", "said nothing for 1 s"),
        ("os.write(1, b'half a line'); time.sleep(60)", "timeout", "said nothing for 1 s"),
        ("signal.signal(15, signal.SIG_IGN); time.sleep(60)", "timeout", "said nothing for 1 s"),
    ],
)
def test_a_worker_that_fails_is_one_line(code, kind, reason):
    silence = 1.0 if kind == "timeout" else 30.0
    with pytest.raises(SideFailed) as failed:
        ask(code, silence)

    assert kind == failed.value.kind
    assert reason in str(failed.value)
    assert 1 == len(str(failed.value).splitlines())


def test_a_worker_that_does_not_even_start_to_read_is_one_line():
    child = Child({"tokens": 1}, silence_s=30, program=(sys.executable, "-c", "raise SystemExit(4)"))
    with child, pytest.raises(SideFailed, match="the process ended with 4"):
        child.measured()


def test_lines_may_come_in_pieces_and_together():
    parts = ('{"event":', ' "opened"}\\n{"event": "measured"', "}\\n")
    slow = "".join(f"os.write(1, b'{part}'); time.sleep(.1)\n" for part in parts)

    assert {"event": "measured"} == ask(slow)


def test_a_worker_that_goes_on_after_its_answer_is_ended():
    assert {"event": "measured"} == ask("say(event='measured'); time.sleep(600)")


def test_signs_of_life_keep_a_slow_worker():
    """It takes three times as long as it may be silent."""
    assert {"event": "measured"} == ask(
        "for _ in range(9): say(event='alive'); time.sleep(.2)\nsay(event='measured')", 0.6
    )


def test_kill_from_another_thread_ends_the_wait():
    with Child({}, silence_s=60, program=program("time.sleep(60)")) as child:
        threading.Timer(0.3, child.kill).start()
        began = time.monotonic()
        with pytest.raises(SideFailed, match="SIGKILL"):
            child.measured()

    assert time.monotonic() - began < 20


def test_the_real_worker_ends_with_its_parent(tmp_path):
    """A parent that is killed cannot end it; the end of its input does."""
    code = (
        "import sys, time; from bmoe.bench.child import Child\n"
        "child = Child({'profile': 'demo'}, silence_s=60, program=(sys.executable, '-c',\n"
        "    'import bmoe.bench.worker as w, time; w._serve = lambda *a: time.sleep(600); w.main()'))\n"
        "child._process.stdin.write(b'{}\\n'); child._process.stdin.flush()\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        time.sleep(1.5)  # it has imported what it needs, and sleeps
        assert Path(f"/proc/{worker}").exists()
        parent.kill()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and running(worker):
        time.sleep(0.1)

    assert not running(worker)


def running(pid):
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


SIDES = [Side("good", "demo"), Side("bad", "demo", overrides=("cache.budget_mb=1",))]


class TestBench:
    def bench(self, code, rounds=3, sides=SIDES, **settings):
        wanted = Settings(
            **{"rounds": rounds, "tokens": 2, "warmup": 0, "cooldown_s": 0.0, "silence_s": 30.0, **settings}
        )
        return Bench(sides, wanted, program=program(code))

    def run(self, bench):
        seen = []
        bench.run(lambda turn: seen.append(("before", turn.round, turn.side)), lambda turn: None)
        return seen

    def test_a_side_that_fails_gets_no_further_turn_and_costs_the_other_nothing(self):
        bench = self.bench("if request['overrides']: os.abort()" + MEASURE)
        seen = self.run(bench)

        assert [(0, 0), (0, 1), (1, 0), (2, 0)] == [turn[1:] for turn in seen]
        assert [0, 0, 0] == [trial.side for trial in bench.result.trials]
        assert ["signal"] == [failure.kind for failure in bench.result.failures.values()]
        assert bench.result.complete

    def test_what_was_measured_before_it_failed_is_kept(self):
        code = "if request['overrides'] and request['prompt'].startswith('def'): sys.exit(1)\n" + MEASURE
        bench = self.bench(code)
        self.run(bench)

        assert [3, 2] == [len(bench.result.of(side)) for side in (0, 1)]
        assert 2 == bench.result.failures[1].round
        assert 2 == bench.result.comparison(1).pairs

    def test_an_answer_that_lacks_something_is_a_failure(self):
        bench = self.bench("say(event='measured', tokens=[1])")
        self.run(bench)

        assert bench.result.failures[0].reason.startswith("the answer of the process lacks bytes, choices, decode_s")

    def test_the_tokens_of_the_first_are_given_to_all(self):
        """So that all sides decode the same ones, whatever they would have chosen."""
        first = "given = request['given']\nassert given or not request['overrides']\n"
        known = "assert given is None or (given['tokens'], given['prompt_ids'], given['n_vocab']) == ([1], [1], 9)\n"
        told = MEASURE.replace("given=False", "given=given is not None")
        bench = self.bench(first + known + told, rounds=1)
        self.run(bench)

        assert {} == bench.result.failures
        assert [False, True] == [trial.given for trial in bench.result.trials]

    def test_cancel_loses_the_measurement_in_progress_and_no_other(self):
        bench = self.bench("if request['overrides']: time.sleep(60)" + MEASURE)
        seen = []

        def before(turn):
            seen.append(turn)
            if turn.side == 1:
                threading.Timer(0.3, bench.cancel).start()

        began = time.monotonic()
        bench.run(before, lambda turn: None)

        assert time.monotonic() - began < 20
        assert [0] == [trial.side for trial in bench.result.trials]
        assert not bench.result.complete
        assert {} == bench.result.failures

    def test_cancel_ends_a_cooldown(self):
        bench = self.bench(MEASURE, cooldown_s=600.0)
        threading.Timer(2.0, bench.cancel).start()
        began = time.monotonic()
        self.run(bench)

        assert time.monotonic() - began < 60
        assert 1 == len(bench.result.trials)

    def test_cancel_before_the_start_measures_nothing(self):
        bench = self.bench(MEASURE)
        bench.cancel()

        assert [] == self.run(bench)
        assert not bench.result.complete


def test_a_worker_ignores_ctrl_c_which_is_for_its_parent():
    with Child({}, silence_s=60, program=program("time.sleep(1); say(event='measured')")) as child:
        assert os.getpgid(child.pid) != os.getpgid(0)
        assert {"event": "measured"} == child.measured()
