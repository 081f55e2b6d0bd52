"""What gets into the page stays text, whatever it is."""

import json
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.reporters.html.palette import category_views
from ampmem.reporters.html.safety import MAX_TEXT, breakable, distinct_texts, json_for_script, unbroken, visible

HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\u2028\x1b[2J\ud800"


@given(st.text(max_size=50))
def test_json_in_a_script_element_is_data_only(text: str) -> None:
    block = json_for_script({text: [text]})
    assert not set("<>&") & set(block)
    assert block.isascii()
    assert json.loads(block) == {text: [text]}


def test_names_of_javascript_are_texts_like_others() -> None:
    data = {"__proto__": {"polluted": True}, "constructor": "</script>"}
    assert json.loads(json_for_script(data)) == data


def test_json_has_no_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_for_script([float("nan")])


@given(st.text(max_size=2 * MAX_TEXT))
def test_shown_text_is_bounded_and_has_no_invisible_character(text: str) -> None:
    shown = visible(text)
    assert not {"Cc", "Cf", "Cs", "Zl", "Zp"} & {unicodedata.category(character) for character in shown}
    assert len(shown) <= MAX_TEXT


def test_invisible_characters_are_spelled_out() -> None:
    assert visible(HOSTILE) == "</script><img src=x onerror=alert(1)>\\u202e\\u2028\\u001b[2J\\ud800"
    assert visible("\U000e0041") == "\\U000e0041"


@given(st.lists(st.text(alphabet="ab\u202e\\u2", max_size=6), unique=True, max_size=30), st.integers(0, 2))
def test_texts_that_differ_look_different(texts: list[str], long: int) -> None:
    texts = [long * 300 * "x" + text for text in texts]
    shown = distinct_texts(texts)
    assert len(set(shown)) == len(texts)
    assert all(len(text) <= MAX_TEXT for text in shown)


def test_very_many_texts_that_look_the_same_are_numbered_at_once() -> None:
    shown = distinct_texts("x" * 500 + str(number) for number in range(20_000))
    assert len(set(shown)) == 20_000
    assert shown[0].endswith("x…")
    assert shown[-1].endswith("… (20000)")


def test_every_category_has_a_name_and_a_colour() -> None:
    views = category_views()
    assert [view.key for view in views] == [str(category) for category in CATEGORIES]
    assert len({view.label for view in views}) == len(views)
    assert len({(view.light, view.pattern) for view in views}) == len(views)
    for view in views:
        assert re.fullmatch(r"#[0-9a-f]{6}", view.light)
        assert re.fullmatch(r"#[0-9a-f]{6}", view.dark)


def test_a_number_stays_with_its_unit_and_a_tag_stays_whole() -> None:
    assert unbroken("<td class=n>3.65 %</td> in 2 steps") == (
        '<td class=n><span class="amount">3.65 %</span></td> in 2 steps'
    )
    assert (
        unbroken('<a title="1.0 MiB">-1,024.5 MiB</a>')
        == '<a title="1.0 MiB"><span class="amount">-1,024.5 MiB</span></a>'
    )
    assert breakable("<1 % of model.layers.attention.weight") == (
        '<span class="amount">&lt;1 %</span> of model.<wbr>layers.<wbr>attention.<wbr>weight'
    )
    drawing = "<svg>\n<text>128 MiB</text></svg>"
    assert unbroken(drawing) == drawing
