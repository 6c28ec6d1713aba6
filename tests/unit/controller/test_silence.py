"""How long a cluster's head counts as silent."""

from hybridflow.controller.backends.ray.pulse import BEAT_SECONDS, HEAD_TIMEOUT_SECONDS, Silence


def test_a_head_that_never_answers_is_silent_for_as_long_as_it_was_asked():
    silence = Silence(0.0)
    assert [silence.look(0.0, float(now)) for now in range(1, 40)] == [float(now) for now in range(1, 40)]


def test_a_driver_that_was_stopped_for_minutes_does_not_blame_the_head():
    silence = Silence(0.0)
    assert silence.look(4.0, 6.0) == 2.0
    after = silence.look(4.0, 306.0)  # stopped in between: no answer came, and none was asked for
    assert after == 2.0 + 2 * BEAT_SECONDS < HEAD_TIMEOUT_SECONDS
    assert silence.look(307.0, 307.5) == 0.5
    assert silence.look(307.0, 309.5) == 2.5
