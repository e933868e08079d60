"""Schedules and rules of TVM's that do something else than they say (docs/tvm.md)."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import ir, s_tir, te, tirx
from tvm.s_tir import Schedule, dlight
from tvm.s_tir.dlight.gpu.matmul import check_sm_version
from tvm.script import tirx as T

from support.stock_tvm import failure, kernel, on_cpu, still


def test_compute_at_drops_the_bound_of_factored_columns() -> None:
    x, k = te.placeholder((4, 21), name="x"), te.reduce_axis((0, 21), name="k")
    sch = Schedule(te.create_prim_func([x, te.compute((4,), lambda i: te.sum(x[i, k], k), name="y")]))
    block = sch.get_sblock("y")
    _, columns = sch.get_loops(block)
    _, lane = sch.split(columns, [None, 8])
    partial = sch.rfactor(lane, 0)
    values = np.arange(84, dtype="float32").reshape(4, 21)
    assert np.array_equal(on_cpu(sch.mod, values, shape=(4,)), values.sum(axis=1))
    sch.compute_at(partial, sch.get_loops(block)[0])
    where = "schedules/recipes/bandwidth.py (loops of rows are merged instead)"
    still("T.where" not in sch.mod.script(), where)
    still(on_cpu(sch.mod, values, shape=(4,))[0] == np.arange(24).sum(), where)


def test_a_write_back_of_fused_loops_has_no_bound() -> None:
    x = te.placeholder((5, 4), name="x")
    sch = Schedule(te.create_prim_func([x, te.compute((5, 4), lambda i, j: x[i, j] * 2, name="y")]))
    block = sch.get_sblock("y")
    _, thread = sch.split(sch.fuse(*sch.get_loops(block)), [None, 32])
    write_back = sch.cache_write(block, 0, "local")
    sch.reverse_compute_at(write_back, thread)
    rows = int(sch.get(write_back).iter_vars[0].dom.extent)
    bounds = sch.mod.script().count("T.where")
    still((rows, bounds) == (8, 1), "schedules/recipes/streamed_weights.py, schedules/loops/warps.py")


def test_a_consumer_that_cuts_short_takes_the_place_of_a_condition() -> None:
    x = te.placeholder((112, 32), name="x")
    y = te.compute((112, 32), lambda i, j: x[i, j] * 2, name="y")
    sch = Schedule(te.create_prim_func([x, te.compute((112, 4), lambda i, j: y[i, j], name="crop")]))
    block = sch.get_sblock("y")
    sch.split(sch.fuse(*sch.get_loops(block)), [None, 1000])
    assert "* 1000 + i_j_fused_1 < 3584" in sch.mod.script()
    sch.reverse_compute_inline(sch.get_sblock("crop"))
    text = sch.mod.script()
    assert "% 32 < 4" in text
    still("< 3584" not in text, "schedules/memory/staging.py, schedules/recipes/split_reduction.py")


def test_the_inverse_of_a_rotation_is_not_one() -> None:
    j = tirx.Var("j", "int32")
    rotated = tirx.IndexMap([j], [tirx.floormod(j + 3, 8)], None).inverse([8])
    first = int(rotated.map_indices([tirx.const(0, "int32")])[0])
    still(first == 0, "relax/rules/normal_form.py (of a map with such an index no inverse is taken)")


def test_regions_are_equal_whatever_buffers_they_are_of() -> None:
    near, far = (tirx.decl_buffer((8,), "float16", name) for name in ("near", "far"))
    same = tvm_ffi.structural_equal(tirx.BufferRegion(near, [ir.Range(0, 8)]), tirx.BufferRegion(far, [ir.Range(0, 8)]))
    assert not tvm_ffi.structural_equal(tirx.BufferLoad(near, [0]), tirx.BufferLoad(far, [0]))
    still(same, "relax/rules/normal_form.py (loads are compared)")


def test_a_consumer_that_repeats_elements_is_not_inlined() -> None:
    x = te.placeholder((8,), name="x")
    y = te.compute((8,), lambda i: x[i] * 2, name="y")
    sch = Schedule(te.create_prim_func([x, te.compute((8, 4), lambda i, _: y[i] + 1, name="z")]))
    said = failure(lambda: sch.reverse_compute_inline(sch.get_sblock("z")))
    still("Cannot dispatch a null expression" in said, "schedules/memory/staging.py")


def test_an_assertion_has_its_parameters_exchanged() -> None:
    made = tirx.AssertStmt(tirx.const(True, "bool"), ir.StringImm("ValueError"), [ir.StringImm("said")])
    assert made.error_kind.value == "ValueError"
    still(list(inspect.signature(tirx.AssertStmt).parameters)[:2] == ["kind", "condition"], "relax/rules/limits.py")


@T.prim_func(s_tir=True)
def tile(a: T.Buffer((16,), "float32", offset_factor=1), b: T.Buffer((16,), "float32", offset_factor=1)):
    with T.sblock("root"):
        T.reads(a[0:16])
        T.writes(b[0:16])
        for lane in range(16):
            with T.sblock("element"):
                i = T.axis.spatial(16, lane)
                b[i] = a[i]


@T.prim_func(s_tir=True)
def call(a: T.Buffer((16,), "float32", offset_factor=1), b: T.Buffer((16,), "float32", offset_factor=1)):
    with T.sblock("root"):
        T.reads(a[0:16])
        T.writes(b[0:16])
        T.evaluate(T.call_extern("int32", "copy", b.access_ptr("w"), a.access_ptr("r")))


def test_a_schedule_with_an_instruction_cannot_be_copied() -> None:
    s_tir.TensorIntrin.register("tests.copy", tile, call, override=True)
    x = te.placeholder((64,), name="x")
    sch = Schedule(te.create_prim_func([x, te.compute((64,), lambda i: x[i], name="y")]))
    _, lanes = sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, 16])
    assert sch.copy()
    sch.tensorize(lanes, "tests.copy")
    still("unordered_map::at" in failure(sch.copy), "schedules/tensor_cores/mma.py (use_instruction comes last)")


def test_annotations_of_another_name_are_ignored() -> None:
    """The one that stages a copy through registers had that name before it was tirx's."""
    x = te.placeholder((8, 32), name="x")
    sch = Schedule(te.create_prim_func([x, te.compute((8, 32), lambda i, j: x[i, j] * 2, name="y")]))
    rows, columns = sch.get_loops(sch.get_sblock("y"))
    sch.reorder(columns, rows)
    sch.bind(columns, "threadIdx.x")
    copy = sch.cache_read(sch.get_sblock("y"), 0, "shared")
    sch.compute_at(copy, rows)
    plain = kernel(sch.mod)
    sch.annotate(copy, "manifest_shared_memory_local_stage", 1)
    still(kernel(sch.mod) == plain, "schedules/memory/staging.py (stage_through_registers)")
    sch.annotate(copy, "tirx.manifest_shared_memory_local_stage", 1)
    assert "local" in kernel(sch.mod)


def test_an_exception_loses_its_type_in_a_walk() -> None:
    class Refused(ValueError):
        """One of ours."""

    def refuse(_: tirx.Var) -> None:
        raise Refused("not this one")

    with pytest.raises(Exception, match="not this one") as caught:
        tvm_ffi.structural_walk(tirx.Var("i", "int32") + 1, (tirx.Var, refuse))
    still(not isinstance(caught.value, Refused), "callbacks of structural_walk, which only take notes")


def test_dlight_takes_hopper_for_a_gpu_without_tensor_cores() -> None:
    a, b, k = (
        *(te.placeholder((256, 256), "float16", name=name) for name in "AB"),
        te.reduce_axis((0, 256), name="k"),
    )
    c = te.compute((256, 256), lambda i, j: te.sum(a[i, k].astype("float32") * b[j, k].astype("float32"), k), "C")
    with tvm.target.Target("nvidia/nvidia-h100"):
        detected = tvm.target.Target.current()
        rule = dlight.ApplyDefaultSchedule(dlight.gpu.Matmul())
        text = rule(tvm.IRModule({"main": te.create_prim_func([a, b, c])})).script()
    where = "relax/rules (which read the architecture themselves), harness/peers/dlight.py"
    still((check_sm_version("sm_90"), check_sm_version("sm_90a")) == (90, -1), where)
    still("tirx.is_scheduled" in text and "mma" not in text, f"{where}: {detected.attrs['arch']}")
