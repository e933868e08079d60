"""Records: everything that was measured, one line of JSON each, and the only source of tables, plots and pages.

:mod:`.kinds` says what there is, :mod:`.parts` what it is made of; :mod:`.writing` appends, :mod:`.reading` checks.
"""

from tensorir_ladder.harness.records.groups import ShapeGroup, shape_groups
from tensorir_ladder.harness.records.intervals import median_interval
from tensorir_ladder.harness.records.journal import Journal
from tensorir_ladder.harness.records.kinds import (
    FIRST,
    Counters,
    FleetRun,
    Line,
    Listing,
    ModelRecord,
    Mutants,
    Record,
    ShapeRecord,
    StreamRecord,
    Timeline,
    TunedConfig,
    now,
    shape_text,
)
from tensorir_ladder.harness.records.names import NAME, RecordError, gpu_slug, path_name
from tensorir_ladder.harness.records.parts import (
    Candidate,
    CaughtMutant,
    CodeFacts,
    DepthForecast,
    Energy,
    EnergyTurn,
    Environment,
    FunctionTimed,
    GpuState,
    LivingMutant,
    MeasuredOn,
    Method,
    Peer,
    Resources,
    RulesTimed,
    Timing,
    Track,
    Verification,
)
from tensorir_ladder.harness.records.reading import (
    KINDS,
    RESULTS,
    bad_lines,
    load_counters,
    load_listings,
    load_models,
    load_records,
    load_shapes,
    load_streams,
    load_timelines,
    load_tuned,
    newest,
    read_file,
    read_place,
    read_places,
)
from tensorir_ladder.harness.records.strict import decode
from tensorir_ladder.harness.records.writing import append, check_appendable, check_writable, write_atomically
