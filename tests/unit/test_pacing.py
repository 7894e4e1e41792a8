"""The pacer's answers, to the exact moment, from an injected clock."""

import threading
import time

import pytest

from kvmoor.host_memory.pacing import Clock, StepPacer


class SetClock(Clock):
    """A clock that shows what a test sets."""

    seconds = 1024.0

    def now(self):
        return self.seconds


@pytest.fixture
def clock():
    return SetClock()


@pytest.fixture
def pacer(clock):
    return StepPacer(clock)


def step(pacer, clock, seconds, count):
    """Let the engine begin `count` steps, each `seconds` after the one before."""
    for _ in range(count):
        clock.seconds += seconds
        pacer.note_step()


def test_the_first_registration_waits_for_nothing(pacer, clock):
    """Before any registration there is no distance to keep, also while the engine steps."""
    assert 0 == pacer.delay_s()
    step(pacer, clock, 0.010, 5)
    assert 0 == pacer.delay_s()


def test_an_idle_engine_costs_a_breath_only(pacer, clock):
    """Without steps the next registration may begin one millisecond after the end of the last."""
    pacer.note_registration()
    assert pytest.approx(0.001) == pacer.delay_s()
    clock.seconds += 0.001
    assert 0 == pytest.approx(pacer.delay_s())


def test_while_the_engine_steps_registrations_are_50_ms_apart(pacer, clock):
    """The 50 ms run from the end of the last one, whatever it took."""
    step(pacer, clock, 0.010, 5)
    pacer.note_registration()
    assert pytest.approx(0.050) == pacer.delay_s()
    step(pacer, clock, 0.010, 4)
    assert pytest.approx(0.010) == pacer.delay_s()
    step(pacer, clock, 0.010, 1)
    assert 0 == pytest.approx(pacer.delay_s())


@pytest.mark.parametrize(("step_s", "idle_after_s"), [(0.001, 0.1), (0.030, 0.1), (0.050, 0.15), (0.500, 1.5)])
def test_the_engine_idles_after_three_of_its_own_steps(pacer, clock, step_s, idle_after_s):
    """It counts as stepping for three recent step lengths after a step, at least 100 ms, and not a moment longer."""
    step(pacer, clock, step_s, 20)
    last_step = clock.seconds
    clock.seconds = last_step + idle_after_s - 0.005
    pacer.note_registration()
    assert pytest.approx(0.005) == pacer.delay_s()  # then it idles, and full speed begins
    clock.seconds = last_step + idle_after_s + 0.0005
    assert 0 == pacer.delay_s()


def test_a_long_step_is_no_rest_where_ends_are_noted(pacer, clock):
    """An engine that notes the ends of its steps is not disturbed in the midst of one, however long it takes."""
    for _ in range(9):
        step(pacer, clock, 0.010, 1)
        pacer.note_step_end()
    step(pacer, clock, 0.010, 1)  # a prefill of two seconds begins
    for _ in range(20):
        clock.seconds += 0.1
        pacer.note_registration()
        assert pytest.approx(0.050) == pacer.delay_s()
    pacer.note_step_end()
    clock.seconds += 0.1
    pacer.note_registration()
    assert pytest.approx(0.001) == pacer.delay_s()


def test_one_rest_between_requests_is_no_step_length(pacer, clock):
    """A pause of seconds among short steps does not make the engine look busy for three times as long."""
    step(pacer, clock, 0.010, 9)
    step(pacer, clock, 5.0, 1)
    clock.seconds += 0.090
    pacer.note_registration()
    assert pytest.approx(0.010) == pacer.delay_s()


def test_what_takes_longer_than_any_step_is_not_counted(pacer, clock):
    """An engine that is used once a minute idles in between."""
    step(pacer, clock, 60.0, 9)
    clock.seconds += 0.090
    pacer.note_registration()
    assert pytest.approx(0.010) == pacer.delay_s()


def test_short_steps_are_counted_too(pacer, clock):
    """Where steps take less than two milliseconds, 250 of them have to pass, though 50 ms are over before."""
    step(pacer, clock, 0.0004, 20)
    pacer.note_registration()
    clock.seconds += 0.048
    step(pacer, clock, 0.0004, 40)  # 64 ms, 40 steps
    assert pytest.approx(210 * 0.0004) == pacer.delay_s()
    step(pacer, clock, 0.0004, 209)
    assert pytest.approx(0.001) == pacer.delay_s()  # not looked at more often than that
    step(pacer, clock, 0.0004, 1)
    assert 0 == pacer.delay_s()


def test_short_steps_that_end_are_not_waited_for(pacer, clock):
    """If the engine rests before its 250th step, the registration begins when the engine counts as idle."""
    step(pacer, clock, 0.0004, 20)
    pacer.note_registration()
    step(pacer, clock, 0.0004, 10)
    clock.seconds += 0.090
    assert pytest.approx(0.010) == pacer.delay_s()
    clock.seconds += 0.011
    assert 0 == pacer.delay_s()


def test_steps_of_two_milliseconds_are_not_short(pacer, clock):
    """From two milliseconds on, time alone decides."""
    step(pacer, clock, 2**-8, 20)
    pacer.note_registration()
    step(pacer, clock, 2**-8, 13)
    assert 0 == pacer.delay_s()


def test_no_answer_is_ever_longer_than_the_engine_counts_as_stepping():
    """Over a long random life each answer is between 0 and the window, and 0 comes as soon as it was promised."""
    import random

    for seed in range(50):
        clock, rng = SetClock(), random.Random(seed)
        pacer = StepPacer(clock)
        for _ in range(200):
            clock.seconds += rng.choice([0.0001, 0.0004, 0.002, 0.03, 0.2, 20])
            rng.choice([pacer.note_step, pacer.note_step, pacer.note_registration])()
            assert 0 <= pacer.delay_s() <= 0.6
        for _ in range(3):  # nothing happens any more: at most two answers until it is time
            clock.seconds += pacer.delay_s() + 1e-9
        assert 0 == pacer.delay_s()


def test_noting_a_step_is_cheap_and_safe_from_any_thread(pacer):
    """Threads that note steps at once lose none of them."""
    threads = [threading.Thread(target=lambda: [pacer.note_step() for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert 4000 == pacer._steps_since_registration


def test_the_real_clock_waits_no_longer_than_told():
    """A wait that nobody ends is over at its deadline; time does not run backwards."""
    clock, changed = Clock(), threading.Condition()
    before, started = clock.now(), time.monotonic()
    with changed:
        clock.wait(changed, 0.01)
    assert time.monotonic() - started < 5
    assert clock.now() >= before + 0.009
