"""The tiles of steps 1 to 6, in which each thread computes a small tile of outputs."""

from tensorir_ladder.schedules.tiles import Choice, ThreadTile, TileSet

# Chosen after an exploratory sweep of 29 tiles on an H200. Step 4 was within 5 % of its best tile at 1024 with two of
# them, and pipelining (3 stages, mean of 256, 512 and 1024) gained +87 % with this one, +8 % with the other,
# 64x64x32/8x4. 64x64x16/4x4, where step 4 reached 0.93 of its best, gained +59 %. That sweep is not kept here.
# 3 stages rather than 4, which is faster at 256 and 512, because with 4 step 6 was 3 % slower than step 5 at 1024.
DEFAULT = Choice(ThreadTile(block=(32, 64, 16), thread=(4, 4)), stages=3)

# What `--tile best` chooses among, for every step and size: small tiles that fill the GPU where outputs are few, large
# ones that use each loaded element more often, and several depths of the k tile.
BEST = tuple(
    map(
        ThreadTile.parse,
        (
            "16x32x32/2x2",
            "16x32x64/2x2",
            "32x32x16/4x4",
            "32x32x32/4x2",
            "32x32x32/4x4",
            "32x64x16/4x4",
            "32x64x32/4x4",
            "32x64x32/8x4",
            "64x32x32/4x2",
            "64x32x32/4x4",
            "64x64x16/4x4",
            "64x64x32/4x4",
            "64x64x16/8x4",
            "64x64x32/8x4",
            "128x64x16/8x4",
            "128x64x32/8x4",
            "64x128x32/8x4",
            "64x128x16/8x8",
            "64x128x32/8x8",
        ),
    )
)
# What `tune` adds: thin k tiles (8 steps), so that large tiles and many stages fit together, and thread tiles of 8x8,
# which load least per multiply-add. An exploratory sweep on an H200, not kept here, showed 64x64x8/8x4 ahead at 1024
# and beyond, and thread tiles of 8x16 far behind: the first has neighbours here.
MORE = tuple(
    map(
        ThreadTile.parse,
        (
            "32x64x8/4x4",
            "32x64x8/8x4",
            "64x32x8/8x4",
            "64x64x8/4x4",
            "64x64x8/8x4",
            "64x128x8/8x4",
            "128x64x8/8x4",
            "64x64x8/8x8",
            "64x64x16/8x8",
            "64x128x8/8x8",
            "128x64x8/8x8",
            "128x64x16/8x8",
            "128x128x8/8x8",
            "128x128x16/8x8",
        ),
    )
)
THREAD_TILES = TileSet(default=DEFAULT, choices=(), best=BEST, tuning=(*BEST, *MORE))
# 1 stage is no pipeline; more than 6 are not tried.
TUNING_STAGES = (2, 3, 4, 5, 6)
