"""Reads what the plugin `files` wrote, as plugins/files/README.md says how, and no more.

    fold.py fold  DIR TABLE [--engine ENGINE]   the table as it is, as COPY prints it
    fold.py rows  DIR TABLE [--engine ENGINE]   its log, a JSON object a row
    fold.py files DIR TABLE                     its files, a JSON object each
    fold.py check DIR                           whether manifest and files agree

TABLE is the table's directory below DIR. ENGINE reads Parquet: `pyarrow` or `duckdb`.
"""

import argparse
import json
import os
import sys

import parquet
from postgres import array_text, copy_line

OWN = "_tg_"
# Of columns whose arrays have another delimiter than the comma when PostgreSQL prints them.
DELIMITERS = {}


class Broken(Exception):
    """The log is not what the README says."""


def require(condition, message):
    if not condition:
        raise Broken(message)


def position(line):
    """A position of the manifest, in comparable form."""
    return line["epoch"], int(line["commit"]), int(line["ordinal"])


def read_manifest(directory):
    """Its events. A last line without its newline is not there."""
    with open(os.path.join(directory, "manifest.ndjson"), encoding="utf-8") as file:
        lines = file.read().split("\n")[:-1]
    events = [json.loads(line) for line in lines]
    require(events and events[0]["kind"] == "head" and events[0]["version"] == 1, "the first line is no head")
    for before, after in zip(events, events[1:]):
        require(before["seq"] < after["seq"], f"seq {after['seq']} follows {before['seq']}")
    return events


def events_of(events, name):
    """Those of one table, under the names that it had before as well."""
    tables = {}
    for event in events[1:]:
        if event["kind"] == "rename":
            require(event["table"] not in tables, f"seq {event['seq']}: there is a table of that name")
            tables[event["table"]] = tables.pop(event["from"])
        else:
            tables.setdefault(event["table"], []).append(event)
            if event["kind"] == "drop":
                del tables[event["table"]]
    return tables.get(name, [])


class Row:
    """One row of the log. `cells` has PostgreSQL's text or None by column name; a cell that
    was not sent is in `missing` and not in `cells`."""

    def __init__(self, op, position, missing, old_key, cells):
        self.op, self.position, self.missing, self.old_key, self.cells = op, position, missing, old_key, cells

    def as_json(self):
        fields = {"op": self.op, "position": self.position, "cells": self.cells}
        if self.missing:
            fields["missing"] = self.missing
        if self.old_key is not None:
            fields["old_key"] = self.old_key
        return json.dumps(fields)


def parquet_rows(path, engine):
    columns = parquet.read(path, engine, DELIMITERS)
    own = {name: columns.pop(name) for name in list(columns) if name.startswith(OWN)}
    for index in range(len(own["_tg_op"])):
        value = {name: values[index] for name, values in own.items()}
        missing = value["_tg_missing"] or []
        cells = {name: texts[index] for name, texts in columns.items() if name not in missing}
        for name in missing:
            require(columns[name][index] is None, f"{path}: {name} was not sent, and has a value")
        if value["_tg_odd"] is not None:
            for name, odd in json.loads(value["_tg_odd"]).items():
                require(cells.get(name, "") is None, f"{path}: {name} is odd, and has a value")
                cells[name] = odd
        at = (int(value["_tg_epoch"]), int(value["_tg_commit"]), int(value["_tg_ordinal"]))
        old_key = None if value["_tg_old_key"] is None else json.loads(value["_tg_old_key"])
        yield Row(value["_tg_op"], at, missing, old_key, cells)


def json_text(value, delimiter=","):
    """A JSON value as PostgreSQL prints it; numbers are texts already."""
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, list):
        return array_text([json_text(item) for item in value], delimiter)
    return value


def no_json(text):
    raise Broken(f"{text} is no JSON")


def ndjson_rows(path):
    with open(path, encoding="utf-8", newline="\n") as file:
        for line in file:
            require(line.endswith("\n"), f"{path} ends within a line")
            # Numbers stay the text they are; JSON has no NaN.
            values = json.loads(line, parse_int=str, parse_float=str, parse_constant=no_json)
            own = {name: values.pop(name) for name in list(values) if name.startswith(OWN)}
            missing = own.get("_tg_missing", [])
            require(not set(missing) & set(values), f"{path}: a cell was not sent, and has a value")
            cells = {name: json_text(value, DELIMITERS.get(name, ",")) for name, value in values.items()}
            cells.update(own.get("_tg_odd", {}))
            at = (int(own["_tg_epoch"]), int(own["_tg_commit"]), int(own["_tg_ordinal"]))
            yield Row(own["_tg_op"], at, missing, own.get("_tg_old_key"), cells)


def read_rows(directory, event, engine):
    path = os.path.join(directory, event["file"])
    return parquet_rows(path, engine) if event["format"] == "parquet" else ndjson_rows(path)


def files_that_count(events):
    """The events of one table that matter: its schemas, and the files of step 1."""
    drops = [index for index, event in enumerate(events) if event["kind"] == "drop"]
    events = events[drops[-1] + 1 :] if drops else events
    finished = {event["run"]: event for event in events if event["kind"] == "finish-copy"}
    start, run = 0, None
    for index, event in enumerate(events):
        if event["kind"] == "begin-copy" and event["run"] in finished:
            start, run = index, event["run"]
    counted = []
    for index, event in enumerate(events):
        if event["kind"] == "schema":
            counted.append(event)
        elif event["kind"] == "file" and index > start and event.get("run", run) == run:
            counted.append(event)
    return counted, finished.get(run)


class Table:
    """A table while its log is folded. Rows are cells by the source's ordinal."""

    def __init__(self):
        self.columns, self.key, self.rows = [], [], {}

    def change_schema(self, event):
        self.columns = [column for column in event["columns"] if "ordinal" in column]
        self.ordinals = {column["name"]: column["ordinal"] for column in self.columns}
        before, self.key = self.key, [self.ordinals[name] for name in event["key"]]
        for rows in self.rows.values():
            for row in rows:
                for column in self.columns:
                    row.setdefault(column["ordinal"], column.get("default"))
        if self.key != before:
            known = [row for rows in self.rows.values() for row in rows]
            self.rows = {}
            for row in known:
                self.put(row)

    def by_ordinal(self, cells):
        return {self.ordinals[name]: text for name, text in cells.items()}

    def identity(self, cells):
        """What names a row: its key, or without one all its cells."""
        ordinals = self.key or [column["ordinal"] for column in self.columns]
        return tuple(cells[ordinal] for ordinal in ordinals)

    def take(self, identity):
        """Takes away the row, or of equal ones one."""
        rows = self.rows.get(identity)
        if not rows:
            return None
        row = rows.pop()
        if not rows:
            del self.rows[identity]
        return row

    def put(self, cells):
        rows = self.rows.setdefault(self.identity(cells), [])
        require(not (rows and self.key), f"two rows have the key {self.identity(cells)}")
        rows.append(cells)

    def apply(self, row):
        cells = self.by_ordinal(row.cells)
        if row.op == "truncate":
            self.rows.clear()
        elif row.op == "delete":
            self.take(self.identity(cells))
        elif row.op in ("copy", "insert"):
            if self.key:
                self.take(self.identity(cells))
            self.put(cells)
        elif row.op == "update":
            before = None
            if row.old_key is not None:
                before = self.take(self.identity(self.by_ordinal(row.old_key)))
            if self.key:
                same = self.take(self.identity(cells))
                before = same if before is None else before
            for name in row.missing:
                require(before is not None, f"{name} was not sent for a row that was never there")
                cells[self.ordinals[name]] = before[self.ordinals[name]]
            self.put(cells)
        else:
            raise Broken(f"unknown operation {row.op}")


def fold(directory, name, engine):
    events = events_of(read_manifest(directory), name)
    counted, copy = files_that_count(events)
    table, last = Table(), None
    for event in counted:
        if event["kind"] == "schema":
            table.change_schema(event)
            continue
        for row in read_rows(directory, event, engine):
            if row.op != "copy":
                if last is not None and row.position <= last:
                    continue
                last = row.position
                if copy is not None:
                    require(row.position > position(copy["as_of"]), f"{row.position} is in the copy already")
            table.apply(row)
    for rows in table.rows.values():
        for row in rows:
            yield [row[column["ordinal"]] for column in table.columns]


def check(directory):
    """Reads everything, and counts."""
    events = read_manifest(directory)
    named, counts, last, runs = set(), {"files": 0, "rows": 0, "duplicates": 0}, {}, {}
    schemas, unfinished = {}, set()
    for event in events:
        if event["kind"] == "rename":
            runs[event["table"]] = runs.pop(event["from"], None)
        elif event["kind"] == "begin-copy":
            before = runs.get(event["table"])
            unfinished |= {before} if before else set()
            runs[event["table"]] = event["run"]
        elif event["kind"] == "finish-copy":
            require(runs[event["table"]] == event["run"], f"seq {event['seq']}: another run is under way")
            runs[event["table"]] = None
    for event in events:
        if event["kind"] == "schema":
            schemas[event["table"]] = event
        if event["kind"] == "rename":
            schemas[event["table"]] = schemas.pop(event["from"])
            last[event["table"]] = last.pop(event["from"], (-1, 0, 0))
        if event["kind"] != "file":
            continue
        path = os.path.join(directory, event["file"])
        named.add(path)
        require(event["snapshot"] == schemas[event["table"]]["snapshot"], f"{path} has not the schema before it")
        # Of a copy that was begun again.
        if event.get("run") in unfinished and not os.path.exists(path):
            continue
        if event["format"] == "parquet":
            parquet.check_types(path, schemas[event["table"]]["columns"])
        rows = list(read_rows(directory, event, "pyarrow"))
        require(len(rows) == event["rows"], f"{path} has {len(rows)} rows, not {event['rows']}")
        require(rows[0].position == position(event["first"]), f"{path}: its first position is another")
        require(rows[-1].position == position(event["last"]), f"{path}: its last position is another")
        counts["files"] += 1
        counts["rows"] += len(rows)
        for row in rows if "run" not in event else []:
            before = last.get(event["table"], (-1, 0, 0))
            counts["duplicates"] += row.position <= before
            last[event["table"]] = max(before, row.position)
    for root, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(root, name)
            if name != "manifest.ndjson":
                require(path in named, f"{path} is not in the manifest")
    return counts


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("command", choices=["fold", "rows", "files", "check"])
    arguments.add_argument("directory")
    arguments.add_argument("table", nargs="?")
    arguments.add_argument("--engine", choices=["pyarrow", "duckdb"], default="pyarrow")
    arguments.add_argument("--delimiters", type=json.loads, default={}, help="of columns' arrays, by name")
    given = arguments.parse_args()
    DELIMITERS.update(given.delimiters)
    events = read_manifest(given.directory)
    files = [event for event in events_of(events, given.table) if event["kind"] == "file"]
    # Bytes: a lone newline in a text must not become another.
    out = sys.stdout.buffer
    if given.command == "fold":
        for texts in fold(given.directory, given.table, given.engine):
            out.write(copy_line(texts).encode())
    elif given.command == "rows":
        for event in files:
            for row in read_rows(given.directory, event, given.engine):
                out.write(row.as_json().encode() + b"\n")
    elif given.command == "files":
        for event in files:
            path = os.path.join(given.directory, event["file"])
            names = parquet.names(path) if event["format"] == "parquet" else []
            event["columns"] = [name for name in names if not name.startswith(OWN)]
            out.write(json.dumps(event).encode() + b"\n")
    else:
        out.write(json.dumps(check(given.directory)).encode() + b"\n")


if __name__ == "__main__":
    try:
        main()
    except Broken as broken:
        sys.exit(f"fold.py: {broken}")
