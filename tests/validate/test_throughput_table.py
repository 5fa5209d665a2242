"""Reading tables: what is wrong is named with its cure, and nothing worse than a UserError comes out."""

import contextlib
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.errors import UserError
from phalanx.validate.throughput_table import REQUIRED, number, read_table, why_not_priced

HEADER = "id,layers,hidden,seq,gpu,gpus,global_batch"
LINE = "a,32,4096,4096,H100,8,64"
ROW = dict(zip(HEADER.split(","), LINE.split(","), strict=True))


@pytest.fixture
def write(tmp_path):
    def make(content, name="table.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return make


def refusal(path):
    with pytest.raises(UserError) as caught:
        read_table(path)
    return str(caught.value).replace(str(path), "FILE")


def test_rows_lines_and_columns(write):
    table = read_table(write(f"{HEADER},notes\n{LINE},one\nb{LINE[1:]}, two \n"))
    assert [row["id"] for row in table.rows] == ["a", "b"]
    assert table.lines == (2, 3)
    assert table.columns == (*HEADER.split(","), "notes")
    assert table.rows[1]["notes"] == "two"


@pytest.mark.parametrize(
    "text",
    [
        f"\ufeff{HEADER}\n{LINE}\n",  # as spreadsheets save it
        f"{HEADER}\r\n{LINE}\r\n",
        f" {HEADER.replace(',', ' , ')}\n{LINE}",
        f'{HEADER}\n"a",32,4096,4096,"H100",8,64\n\n',
        ",".join(reversed(HEADER.split(","))) + "\n" + ",".join(reversed(LINE.split(","))),
    ],
    ids=["byte order mark", "windows line ends", "spaces in the header", "quotes", "other order"],
)
def test_harmless_differences(write, text):
    assert dict(read_table(write(text)).rows[0]) == ROW


def test_short_and_long_lines(write):
    table = read_table(write(f"{HEADER}\na,32\nb,32,4096,4096,H100,8,64,surplus,more\n"))
    assert table.rows[0]["gpus"] == ""
    assert table.rows[1]["global_batch"] == "64"


def test_a_cell_may_hold_a_line_break(write):
    table = read_table(write(f'{HEADER},notes\n{LINE},"one\ntwo"\nb{LINE[1:]},\n'))
    assert [row["id"] for row in table.rows] == ["a", "b"]


@pytest.mark.parametrize("sign", ["\u2028", "\x85", "\x0c"])
def test_a_cell_may_hold_any_other_sign(write, sign):
    table = read_table(write(f"{HEADER},notes\n{LINE},one{sign}two\n"))
    assert len(table.rows) == 1


def test_missing_columns_are_all_named_with_the_near_miss(write):
    told = refusal(write("id,layer,hidden,seqlen,gpu,gpus\na,1,1,1,H100,1\n"))
    assert told == (
        'FILE:1: has no column "layers"\n  rename the column "layer"\n'
        'FILE:1: has no column "seq"\n  rename the column "seqlen"\n'
        'FILE:1: has no column "global_batch"\n'
        "  add it; required are id, layers, hidden, seq, gpu, gpus, global_batch"
    )


def test_duplicate_and_empty_ids(write):
    told = refusal(write(f"{HEADER}\n{LINE}\n{LINE}\n{LINE[1:]}\n"))
    assert told == (
        'FILE:3: repeats the id "a" of line 2\n  give every row its own id\n'
        "FILE:4: has an empty id\n  give every row its own id"
    )


def test_a_thousand_mistakes_are_not_all_printed(write):
    told = refusal(write("\n".join([HEADER, *[LINE] * 1000])))
    assert told.count("repeats the id") == 20


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not a table of training runs"),
        (b"\n\n", "is not a table of training runs"),
        (b"just prose, no header at all\n", 'has no column "id"'),
        (b"\x00\x01\x02PK", "holds a NUL byte"),
        ("id,layers\xe9".encode("latin-1"), "byte 0xe9 is not UTF-8"),
        (HEADER.encode(), "has a header but no rows"),
        ((HEADER + "\n" + LINE + "," + "x" * 200_000).encode(), "is not CSV: field larger than field limit"),
    ],
    ids=["empty", "blank", "prose", "binary", "latin-1", "header only", "huge cell"],
)
def test_what_is_no_table(write, content, told):
    text = refusal(write(content))
    assert told in text
    assert "\n  " in text  # with a cure


def test_a_missing_file_and_a_directory(tmp_path):
    assert refusal(tmp_path / "no.csv") == "FILE: there is no such CSV file"
    assert refusal(tmp_path) == "FILE: is a folder, not a CSV file"
    (tmp_path / "file").touch()
    assert " is a file, not a folder" in refusal(tmp_path / "file" / "x.csv")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file(write):
    path = write(HEADER)
    path.chmod(0)
    assert "cannot be read: Permission denied" in refusal(path)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "huge.csv"
    with path.open("wb") as file:
        file.truncate(300 * 2**20)  # sparse: takes no disk
    assert "is larger than 256 MiB" in refusal(path)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300) | st.text(alphabet='id,layers"\n\r\t;0\u2028é', max_size=200).map(str.encode))
def test_any_bytes_give_a_table_or_a_user_error(tmp_path, content):
    path = tmp_path / "any.csv"
    path.write_bytes(HEADER.encode() + b"\n" + content)
    with contextlib.suppress(UserError):  # anything else is a bug
        table = read_table(path)
        assert len({row["id"] for row in table.rows}) == len(table.rows)


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8.0), (" 8 ", 8.0), ("8.5", 8.5), ("1e3", 1000.0), ("-1", -1.0), ("", None), ("eight", None), ("nan", None),
     ("inf", None), ("-inf", None), ("1e400", None), ("0x10", None), ("8 GB", None)],
)  # fmt: skip
def test_number(text, value):
    assert number({"x": text}, "x") == value


def test_number_of_an_absent_column():
    assert number({}, "x") is None


def test_a_good_row_has_no_complaint():
    assert why_not_priced(ROW) == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layers": ""}, "layers is empty"),
        ({"hidden": "wide"}, "hidden = 'wide' is not a number"),
        ({"seq": "nan"}, "seq = 'nan' is not a number"),
        ({"gpus": "0"}, "gpus = 0 is less than 1"),
        ({"global_batch": "-64"}, "global_batch = -64 is less than 1"),
        ({"seq": "1e12"}, "seq = 1e+12 is too large to be meant"),
        ({"tp": "two"}, "tp = 'two' is not a whole number of 1 or more"),
        ({"pp": "0"}, "pp = '0' is not a whole number of 1 or more"),
        ({"heads": "-1"}, "heads = '-1' is not a whole number of 1 or more"),
        ({"gpu": ""}, "gpu is empty"),
        ({"tp": "2", "dp": "8"}, "tp x pp x cp x dp = 16 is not gpus = 8"),
    ],
)
def test_complaints_name_the_cell(changes, told):
    assert why_not_priced(ROW | changes) == told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        # Each of these once crashed the whole table or was priced as nonsense.
        ({"layers": "0.5"}, "layers = 0.5 is less than 1"),
        ({"hidden": "0.3"}, "hidden = 0.3 is less than 1"),
        ({"heads": "0.2"}, "heads = '0.2' is not a whole number of 1 or more"),
        ({"nodes_gpu": "-8"}, "nodes_gpu = '-8' is not a whole number of 1 or more"),
        ({"experts": "8", "topk": "-1"}, "topk = '-1' is not a number of 0 or more"),
        ({"inter_link_gbps_per_gpu": "-100"}, "inter_link_gbps_per_gpu = '-100' is not a number of 0 or more"),
        ({"experts": "8", "moe_ffn": "-5"}, "moe_ffn = '-5' is not a number of 0 or more"),
        ({"tp": "16"}, "tp x pp x cp = 16 does not divide gpus = 8"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes, told):
    assert why_not_priced(ROW | changes) == told


def test_long_garbage_is_shortened():
    assert len(why_not_priced(ROW | {"layers": "x" * 10_000})) < 100


@pytest.mark.parametrize("name", REQUIRED)
def test_every_required_column_is_required(write, name):
    kept = [column for column in HEADER.split(",") if column != name]
    assert f'has no column "{name}"' in refusal(write(",".join(kept) + "\n" + ",".join("1" for _ in kept)))
