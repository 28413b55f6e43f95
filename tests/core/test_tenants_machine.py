"""The planner's machine with tenants, each of which has slots of its own; see `world`."""

import pytest
from core.machines import AS_THE_PROFILE
from core.terms import k
from core.test_planner_machine import PlannerMachine
from core.world import World
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from kvoffload_async.core.primary import Tenancy

pytestmark = pytest.mark.stateful

NUM_TENANTS = 3


def tenant_of(key):
    """A key's first byte is that of its tenant, or of a name, which is the first tenant's."""
    return key[0] if key[0] < NUM_TENANTS else 0


class TenantWorld(World):
    """Each request belongs to a tenant, and asks for the blocks of that one."""

    quotas = ()

    def __init__(self, num_slots, *args, **options):
        options["tenancy"] = Tenancy(self.quotas, tenant_of, "ABCDEFGH"[: len(self.quotas)])
        super().__init__(sum(self.quotas), *args, **options)
        self.tenants = {}

    def begin(self, req_id="r", *, key_positions=None, **fields):
        tenant = len(self.tenants) % len(self.quotas)
        self.tenants[req_id] = tenant
        own = {self.own(tenant, key): end for key, end in (key_positions or {}).items()}
        return super().begin(req_id, key_positions=own, **fields)

    def own(self, tenant, name):
        key = name if isinstance(name, bytes) else k(name)
        return key if not tenant or key[0] < NUM_TENANTS else bytes([tenant]) + key

    def names(self, ctx, names):
        return [self.own(self.tenants[ctx.req_id], name) for name in names]

    def lookup(self, ctx, name):
        return super().lookup(ctx, *self.names(ctx, [name]))

    def lookups(self, ctx, names, *, stop_at_miss=False):
        return super().lookups(ctx, self.names(ctx, names), stop_at_miss=stop_at_miss)

    def offer(self, ctx, names):
        return super().offer(ctx, self.names(ctx, names))

    def load(self, ctx, names):
        return super().load(ctx, self.names(ctx, names))

    def delete(self, keys, *args, **options):
        every = [self.own(tenant, key) for tenant in range(len(self.quotas)) for key in keys]
        return super().delete(every, *args, **options)


class TenantsMachine(PlannerMachine):
    @initialize(quotas=st.lists(st.integers(1, 5), min_size=2, max_size=NUM_TENANTS))
    def build_for_tenants(self, quotas):
        self.quotas = quotas

    def create_world(self, *args, **options):
        TenantWorld.quotas = getattr(self, "quotas", (2, 3))
        return TenantWorld(*args, **options)

    def in_all_forms(self, keys):
        tenants = range(len(self.world.quotas))
        return {self.world.own(tenant, key) for tenant in tenants for key in keys}

    @invariant()
    def tenants_keep_to_their_quotas(self):
        if hasattr(self, "world"):
            keys = [key for key, _, _ in self.world.primary.resident()]
            for tenant, quota in enumerate(self.world.quotas):
                assert sum(tenant_of(key) == tenant for key in keys) <= quota


class TestTenants(TenantsMachine.TestCase):
    settings = AS_THE_PROFILE
