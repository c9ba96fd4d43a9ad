"""What the warps of the fused expert chain share: compile-time figures and shared memory.

No future annotations here: the compiler reads the annotations of aggregates as types.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate


@aggregate
class Cut:
    """Compile-time figures of one chain, in the shape letters of ``epdecode.batch``.

    TOKENS: token rows of a tile, in BOXES_M boxes of BOX_M rows; from 64 up they are the left
    operand of the products (ROWS_LEFT), below that the weights are. UP_*, DOWN_*: weight columns
    of tiles and K steps of the two GEMMs. A down tile is DOWN_ROWS weight rows: two boxes of rows
    side by side in K (DOWN_GROUPS = 2) when NARROW, else one above the other. The K steps of
    gate-up tiles are shared out to SPLITS parts where all tiles' sums have PLACES. FEW: all
    experts' gate-up tiles might leave SMs without one.
    """

    E: gl.constexpr
    E_POW2: gl.constexpr
    M: gl.constexpr
    H: gl.constexpr
    SIZE: gl.constexpr
    TOKENS: gl.constexpr
    BOX_M: gl.constexpr
    BOXES_M: gl.constexpr
    ROWS_LEFT: gl.constexpr
    STAGES: gl.constexpr
    SLOTS: gl.constexpr
    NARROW: gl.constexpr
    SPLITS: gl.constexpr
    PLACES: gl.constexpr
    TILES_M: gl.constexpr
    UP_COLUMNS: gl.constexpr
    DOWN_COLUMNS: gl.constexpr
    UP_STEPS: gl.constexpr
    DOWN_STEPS: gl.constexpr
    DOWN_ROWS: gl.constexpr
    DOWN_GROUPS: gl.constexpr
    BOXES: gl.constexpr
    LANES: gl.constexpr
    BLOCKS: gl.constexpr
    FLAGS: gl.constexpr
    FEW: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, E, E_POW2, M, H, SIZE, TOKENS, STAGES, NARROW, SPLITS, PLACES) -> None:
        groups = 2 if NARROW else 1
        box = min(TOKENS, 64)
        self.E = gl.constexpr(E)
        self.E_POW2 = gl.constexpr(E_POW2)
        self.M = gl.constexpr(M)
        self.H = gl.constexpr(H)
        self.SIZE = gl.constexpr(SIZE)
        self.TOKENS = gl.constexpr(TOKENS)
        self.BOX_M = gl.constexpr(box)
        self.BOXES_M = gl.constexpr(TOKENS // box)
        self.ROWS_LEFT = gl.constexpr(TOKENS >= 64)
        self.STAGES = gl.constexpr(STAGES)
        self.SLOTS = gl.constexpr(2)
        self.NARROW = gl.constexpr(NARROW)
        self.SPLITS = gl.constexpr(SPLITS)
        self.PLACES = gl.constexpr(PLACES)
        self.TILES_M = gl.constexpr(-(-M // 16))
        self.UP_COLUMNS = gl.constexpr(SIZE // 128)
        self.DOWN_ROWS = gl.constexpr(256 // groups)
        self.DOWN_COLUMNS = gl.constexpr(H // (256 // groups))
        self.DOWN_GROUPS = gl.constexpr(groups)
        self.UP_STEPS = gl.constexpr(H // 128)
        self.DOWN_STEPS = gl.constexpr(SIZE // (128 * groups))
        self.BOXES = gl.constexpr(TOKENS // box * groups)
        self.LANES = gl.constexpr(max(32, box))
        blocks = max(H, SIZE) // 128
        self.BLOCKS = gl.constexpr(max(32, 1 << (blocks - 1).bit_length()))
        self.FLAGS = gl.constexpr(max(32, 1 << (SIZE // 128).bit_length()))
        self.FEW = gl.constexpr(E * (SIZE // 128) <= 256)


@aggregate
class Ring:
    """Shared memory between the loading warps and the math warps, with its barriers.

    A stage holds two 128x128 boxes of weights and up to BOXES boxes of rows with their scales;
    ``full`` completes when both loaders' bytes have come, ``empty`` when both math groups used
    them. A slot describes a tile: five ``words`` (``posted``), the ``block_scales`` of its two
    halves (``scaled``); it is free again when all have ``taken`` it. In ``largest`` [2 turns x 2
    groups, BOX_M] the math groups show each other magnitudes once they have ``met``.
    """

    weights: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor
    posted: gl.shared_memory_descriptor
    block_scales: gl.shared_memory_descriptor
    scaled: gl.shared_memory_descriptor
    taken: gl.shared_memory_descriptor
    largest: gl.shared_memory_descriptor
    met: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, weights, rows, scales, full, empty, words, posted, block_scales, scaled, taken,
        largest, met,
    ) -> None:  # fmt: skip
        self.weights = weights
        self.rows = rows
        self.scales = scales
        self.full = full
        self.empty = empty
        self.words = words
        self.posted = posted
        self.block_scales = block_scales
        self.scaled = scaled
        self.taken = taken
        self.largest = largest
        self.met = met


@gluon.jit
def row_scales(ring: Ring, box, cut: Cut, layout: gl.constexpr) -> tl.tensor:
    """[BOX_M] scales of a box of rows."""
    return ring.scales.index(box).reshape([cut.LANES]).slice(0, cut.BOX_M).load(layout)


@gluon.jit
def block_scale(ring: Ring, place, step, cut: Cut) -> tl.tensor:
    """The scale of one 128x128 block of weights; place: 2 x slot + half of the tile."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flat = ring.block_scales._reinterpret(gl.float32, [2 * cut.SLOTS * cut.BLOCKS, 1], words)
    return gl.max(flat.index(place * cut.BLOCKS + step).load(one), 0)
