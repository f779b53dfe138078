"""The check of assembled products finds what ptxas 12.8 did wrong, and nothing else in the same code."""

import pytest

pytest.importorskip("triton")

from ops.triton.machine_code import _changed_operands, _unset_uniform_registers  # noqa: E402

# The gradients per channel with masks as constants: R109 is set after the first product was issued.
LATE = """
        /*6070*/                   WARPGROUP.ARRIVE ;                                                  /* 0x0 */
        /*6080*/                   LDG.E.64 R122, desc[UR8][R124.64+0x20] ;
        /*6090*/                   HGMMA.64x32x16.F32.BF16 R72, R108, gdesc[UR12].tnspB, RZ, !UPT ;
        /*60a0*/                   UMOV UR14, UR7 ;
        /*60b0*/                   IMAD.MOV.U32 R109, RZ, RZ, 0x3f803f80 ;
        /*60c0*/                   HGMMA.64x32x16.F32.BF16 R72, R100, gdesc[UR12].tnspB, R72, gsb0 ;
        /*60d0*/                   WARPGROUP.ARRIVE ;
        /*60e0*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*60f0*/                   LDSM.16.M88.4 R120, [R10+UR5+0xd000] ;
        /*6100*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*6110*/                   MOV R108, RZ ;
        /*6120*/                   FADD R170, R78, -R237.reuse ;
        /*6130*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*6140*/                   FADD R24, R24, R25 ;
        /*6150*/              @!P4 BRA 0x6070 ;
        /*6160*/                   EXIT ;
"""


def test_operand_set_after_the_product_was_issued() -> None:
    (found,) = _changed_operands(LATE)
    assert found.startswith("IMAD.MOV.U32 R109") and "R72, R108" in found
    assert not _changed_operands(LATE.replace("R109", "R117"))


def test_accumulator_read_before_the_wait() -> None:
    (found,) = _changed_operands(LATE.replace("R109", "R117").replace("FADD R170, R78", "FADD R170, R27"))
    assert found.startswith("FADD R170, R27")


def test_products_that_run_on_into_the_next_trip() -> None:
    no_wait = LATE.replace("R109", "R117").replace("WARPGROUP.DEPBAR.LE gsb0, 0x0 ", "NOP ")
    early = no_wait.replace("FADD R24, R24, R25", "NOP").replace("LDG.E.64 R122", "LDG.E.64 R38")
    (found,) = _changed_operands(early)
    assert found.startswith("LDG.E.64 R38") and "HGMMA.64x32x16.F32.BF16 R24" in found


# The strong gradients in tiles of 16 key channels: UR14 should be the first of four descriptors.
LOST = """
        /*0010*/                   ULDC.64 UR8, c[0x0][0x208] ;
        /*0020*/                   UIADD3 UR30, UR8, 0x2000, URZ ;
        /*0030*/                   UMOV UR31, 0xc0000010 ;
        /*0040*/                   UIADD3 UR14, UP0, UR14, 0x20, URZ ;
        /*0050*/                   UMOV UR15, UR31 ;
        /*0060*/                   LDG.E.128 R28, desc[UR8][R112.64] ;
        /*0070*/                   HGMMA.64x16x16.F32.BF16 R32, R24, gdesc[UR28].tnspB, RZ, !UPT ;
        /*0080*/                   HGMMA.64x16x16.F32.BF16 R32, R28, gdesc[UR12].tnspB, R32, gsb0 ;
        /*0090*/                   EXIT ;
"""


def test_descriptor_made_from_a_register_that_nothing_sets() -> None:
    (found,) = _unset_uniform_registers(LOST)
    assert found.startswith("UIADD3 UR14, UP0, UR14") and "reads UR14," in found
    assert not _unset_uniform_registers(LOST.replace("UP0, UR14, 0x20", "UP0, UR30, 0x20"))


def test_left_descriptor_that_a_product_reads() -> None:
    whole = LOST.replace("UP0, UR14, 0x20", "UP0, UR30, 0x20")
    (found,) = _unset_uniform_registers(whole.replace("R24, gdesc", "gdesc"))
    assert found.startswith("HGMMA") and "reads UR28, UR29," in found


def test_register_that_is_saved_before_it_is_used() -> None:
    whole = LOST.replace("UP0, UR14, 0x20", "UP0, UR30, 0x20")
    assert not _unset_uniform_registers("/*0000*/ MOV R70, UR14 ;" + whole)
    assert _unset_uniform_registers("/*0000*/ UMOV UR5, UR14 ;" + whole)


def test_register_that_a_subroutine_sets() -> None:
    call = LOST.replace("UMOV UR31, 0xc0000010", "CALL.REL.NOINC 0xa0").replace("UMOV UR15, UR31", "UMOV UR31, UR14")
    call = call.replace("UIADD3 UR14, UP0, UR14, 0x20, URZ", "UMOV UR15, UR14")
    routine = "/*00a0*/ UMOV UR14, URZ ;\n/*00b0*/ RET.REL.NODEC R2 0x0 ;\n"
    assert not _unset_uniform_registers(call + routine)
    assert _unset_uniform_registers(call)
