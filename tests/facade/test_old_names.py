"""Names that were replaced still work, and say so."""

import pytest

from kvoffload_async.errors import InvariantError
from kvoffload_async.facade.primary import CPUPrimaryTierOffloadingManager
from kvoffload_async.facade.tiering import TieringOffloadingManager


def test_the_old_name_of_check_invariants_still_works():
    with pytest.warns(DeprecationWarning, match="check_laws is called check_invariants now"):
        manager = TieringOffloadingManager(CPUPrimaryTierOffloadingManager(4), [], check_laws=True)
    manager.planner.counters.jobs_submitted += 1
    with pytest.raises(InvariantError, match="P1 "):
        manager.on_schedule_end()


def test_the_old_name_of_the_planner_still_works(worlds):
    manager = worlds().manager
    with pytest.warns(DeprecationWarning, match="is called planner now"):
        assert manager.engine is manager.planner
