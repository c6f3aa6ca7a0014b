"""A script's table in a page that people write into as well."""

import pytest

from bigtrain.diagnostics.pages import TABLE_BEGINS, TABLE_ENDS, put_table
from bigtrain.errors import UsageError


def test_a_new_page_is_the_table(tmp_path):
    put_table(tmp_path / "new" / "page.md", "| a |\n")
    assert (tmp_path / "new" / "page.md").read_text() == f"{TABLE_BEGINS}\n| a |\n{TABLE_ENDS}\n"


def test_what_was_written_by_hand_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# by hand\n")
    put_table(page, "| a |")
    page.write_text(page.read_text() + "\nbelow, by hand\n")
    put_table(page, "| b |\n| c |\n")
    assert page.read_text() == f"# by hand\n\n{TABLE_BEGINS}\n| b |\n| c |\n{TABLE_ENDS}\n\nbelow, by hand\n"


@pytest.mark.parametrize("text", [f"x\n{TABLE_BEGINS}\n| a |\n", f"| a |\n{TABLE_ENDS}\n", f"{TABLE_ENDS}\n{TABLE_BEGINS}\n"])
def test_half_a_mark_is_refused_before_anything_is_lost(text, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(UsageError, match="without"):
        put_table(page, "| b |")
    assert page.read_text() == text
