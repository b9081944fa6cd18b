"""Tables for notebooks."""

from harp.system.notebook import html_table


def test_a_table_has_title_cells_and_note_as_text() -> None:
    text = html_table("a < b", ("name", "n"), [["<script>", "1"]], "c & d")
    assert "<b>a &lt; b</b>" in text and "&lt;script&gt;" in text and "<p>c &amp; d</p>" in text
    assert text.count("<tr>") == 2 and text.count("text-align:right") == 2
    assert "text-align:right" not in html_table("t", ("a", "b"), [["c", "d"]], words=True)
