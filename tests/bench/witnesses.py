"""Small benches, and tiers that note what a bench does to them."""

SMALL = (
    *("--total-bytes", "128KiB", "--keys-per-job", "4", "--one-job", "8"),
    *("--rounds", "2", "--threads", "2"),
)
WITNESSES = """
    import os
    import signal
    from kvoffload_async.facade.secondary import ExampleSecondaryTierManager, SecondaryTierManager
    from kvoffload_async.errors import TierUnavailableError
    from kvoffload_async.tiers.example import ExampleTier

    opened = []

    class Witness(SecondaryTierManager):
        '''Notes what is in its directory when it is opened, and leaves something there.'''
        def __init__(
            self, offloading_spec, primary_kv_view, tier_type="Witness", *, root_dir, **options
        ):
            opened.append((tier_type, root_dir, os.listdir(root_dir)))
            os.mkdir(os.path.join(root_dir, "folder"))
            with open(os.path.join(root_dir, "folder", "file"), "wb") as file:
                file.write(bytes(1000))
            tier = ExampleTier()
            super().__init__(offloading_spec, primary_kv_view, tier_type, tier, **options)

    class Second(Witness):
        pass

    class SoonBroken(ExampleTier):
        '''The first blocks are fine.'''
        count = 0
        async def load(self, job):
            SoonBroken.count += 1
            if SoonBroken.count > 1:
                raise TierUnavailableError("worn out")
            return await super().load(job)

    class SoonForgetful(ExampleTier):
        '''Says that it has loaded the later blocks, and has not.'''
        count = 0
        async def load(self, job):
            SoonForgetful.count += 1
            return {} if SoonForgetful.count > 1 else await super().load(job)

    class Interrupted(Witness):
        '''Somebody presses Ctrl-C in the first round, after the rehearsal.'''
        count = 0
        def __init__(self, *arguments, **options):
            Interrupted.count += 1
            if Interrupted.count == 2:
                signal.raise_signal(signal.SIGINT)
            super().__init__(*arguments, **options)

    class FakePeer:
        '''Another engine's tier, though it is one of this package's.'''
        def __init__(self, name, options, place):
            self.name, self.options, self.place = name, options, place
        def capacity_bytes(self, stored_bytes):
            return None
        def open(self, view, directory, stored_bytes):
            from kvoffload_async.bench.contender import OpenOwnTier
            return OpenOwnTier(ExampleSecondaryTierManager(None, view))
"""
"""A module."""
