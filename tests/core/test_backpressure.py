import pytest

from kvoffload_async.core.backpressure import Backpressure, BackpressureSettings

MIB = 1 << 20
SETTINGS = BackpressureSettings(high_water_s_per_mib=0.010, low_water_s_per_mib=0.002)


def pressed(seconds=0.030, now_s=0.0):
    detector = Backpressure(SETTINGS)
    for _ in range(10):
        detector.store_ended(seconds, MIB, now_s)
    return detector


def drops(detector, now_s, count):
    return sum(detector.drops_store(now_s) for _ in range(count))


def test_the_first_completions_seed_the_average_and_press_nothing():
    detector = Backpressure(SETTINGS)
    for _ in range(9):
        detector.store_ended(1.0, MIB, 0.0)
    assert not detector.is_pressed
    detector.store_ended(1.0, MIB, 0.0)
    assert detector.is_pressed


def test_latency_counts_per_mebibyte_and_empty_stores_do_not():
    detector = pressed(0.009 * 4)
    assert detector.is_pressed
    calm = Backpressure(SETTINGS)
    for _ in range(10):
        calm.store_ended(0.009 * 4, 4 * MIB, 0.0)
    calm.store_ended(100.0, 0, 0.0)
    assert not calm.is_pressed


@pytest.mark.parametrize(("seconds", "dropped"), [(0.012, 10), (0.020, 50), (0.030, 100), (1, 100)])
def test_the_share_that_is_dropped_grows_with_the_latency(seconds, dropped):
    assert drops(pressed(seconds), 0.0, 100) == pytest.approx(dropped, abs=1)


def test_a_calm_tier_drops_nothing():
    assert drops(pressed(0.005), 0.0, 100) == 0


def test_the_average_decays_while_nothing_ends_so_that_it_can_recover_50031_50045():
    """50031, 50045: jobs piled up without bound; what stopped them must also end."""
    detector = pressed(0.030)
    assert drops(detector, 0.0, 100) == pytest.approx(100, abs=1)
    assert drops(detector, 2.0, 100) == pytest.approx(25, abs=1)
    assert detector.is_pressed
    detector.drops_store(8.0)
    assert not detector.is_pressed


def test_for_a_second_after_recovery_every_second_store_is_dropped():
    detector = pressed(0.030)
    detector.drops_store(8.0)
    assert drops(detector, 8.5, 10) == 5
    assert drops(detector, 9.5, 10) <= 1


def test_failures_in_a_row_count_as_very_slow_until_the_decay_admits_a_probe():
    detector = Backpressure(SETTINGS)
    detector.store_failed(0.0)
    detector.store_failed(0.0)
    assert not detector.is_pressed
    detector.store_failed(0.0)
    assert detector.is_pressed
    assert drops(detector, 0.0, 10) == 10
    assert drops(detector, 4.0, 10) < 10


def test_a_store_that_works_after_failures_ends_the_pressure_though_the_seed_is_small():
    """Before ten samples nothing presses, but what presses must be able to end."""
    detector = Backpressure(SETTINGS)
    for _ in range(3):
        detector.store_failed(0.0)
    detector.store_ended(0.001, MIB, 1.0)
    assert not detector.is_pressed


def test_clearing_forgets_everything():
    detector = pressed()
    detector.clear()
    assert not detector.is_pressed
    assert drops(detector, 0.0, 10) == 0
