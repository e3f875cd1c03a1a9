"""The workbench's database: one SQLite database in memory for each session, made from an office."""

import functools
import json
import sqlite3
from typing import Any

from gymckpt.tasksets.office import Office, make_office

MAX_DATABASE_BYTES = 32 << 20
_MAGIC = b"SQLite format 3\0"

_SCHEMA = """
CREATE TABLE customers (customer_id TEXT PRIMARY KEY, name TEXT, city TEXT, email TEXT) WITHOUT ROWID;
CREATE TABLE products (sku TEXT PRIMARY KEY, name TEXT, price_cents INT, opening_price_cents INT) WITHOUT ROWID;
CREATE TABLE stock (sku TEXT, warehouse TEXT, pieces INT, PRIMARY KEY (sku, warehouse)) WITHOUT ROWID;
CREATE TABLE colleagues (email TEXT PRIMARY KEY, name TEXT, team TEXT) WITHOUT ROWID;
CREATE TABLE orders (order_id INTEGER PRIMARY KEY, customer_id TEXT, status TEXT, placed TEXT, warehouse TEXT);
CREATE TABLE order_lines (line_id INTEGER PRIMARY KEY, order_id INT, sku TEXT, quantity INT);
CREATE TABLE mail (
  mail_id INTEGER PRIMARY KEY, folder TEXT, sender TEXT, recipient TEXT, subject TEXT, body TEXT, day TEXT
);
CREATE TABLE events (event_id INTEGER PRIMARY KEY, title TEXT, day TEXT, start TEXT, minutes INT, attendees TEXT);
CREATE TABLE notes (note_id INTEGER PRIMARY KEY, customer_id TEXT, text TEXT);
CREATE TABLE purchases (purchase_id INTEGER PRIMARY KEY, supplier TEXT, sku TEXT, warehouse TEXT, quantity INT);
"""

_COMPARED = {
    "customers": "SELECT customer_id, name, city, email FROM customers",
    "products": "SELECT sku, name, price_cents, opening_price_cents FROM products",
    "stock": "SELECT sku, warehouse, pieces FROM stock",
    "colleagues": "SELECT email, name, team FROM colleagues",
    "orders": (
        "SELECT customer_id, status, placed, warehouse, (SELECT group_concat(sku || ' x' || quantity, ', ') FROM "
        "(SELECT sku, sum(quantity) AS quantity FROM order_lines AS l WHERE l.order_id = o.order_id GROUP BY sku "
        "ORDER BY sku)) FROM orders AS o"
    ),
    "mail": "SELECT folder, sender, recipient, subject, body, day FROM mail",
    "events": "SELECT title, day, start, minutes, attendees FROM events",
    "notes": "SELECT customer_id, text FROM notes",
    "purchases": "SELECT supplier, sku, warehouse, quantity FROM purchases",
}
"""What a database holds, without the numbers that depend on the order in which rows were made."""


def new_database(seed: str) -> sqlite3.Connection:
    """A database of the office of `seed`."""
    return open_database(_seeded(seed))


def open_database(data: bytes) -> sqlite3.Connection:
    """A database of its own from bytes that `serialize` gave; raises `ValueError` if they are none."""
    if len(data) > MAX_DATABASE_BYTES:
        raise ValueError(f"a database of {len(data)} bytes is larger than {MAX_DATABASE_BYTES}")
    if not data.startswith(_MAGIC):
        raise ValueError("these are no bytes of a database")
    database = sqlite3.connect(":memory:", check_same_thread=False)
    try:
        database.deserialize(data)
        database.execute("PRAGMA trusted_schema = OFF")
        verdict = database.execute("PRAGMA quick_check(1)").fetchone()
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    except sqlite3.Error as error:
        database.close()
        raise ValueError(f"these are no bytes of a database: {error}") from error
    if verdict != ("ok",) or not tables >= _COMPARED.keys() | {"order_lines"}:
        database.close()
        raise ValueError("the database is damaged, or not a workbench's")
    return database


def contents(database: sqlite3.Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Everything in it by table, in an order of its own: equal for databases that say the same."""
    return {table: sorted(database.execute(query), key=repr) for table, query in _COMPARED.items()}


@functools.lru_cache(maxsize=256)
def _seeded(seed: str) -> bytes:
    database = sqlite3.connect(":memory:")
    try:
        # Small pages: most tables here hold little, and a session's state is the whole file.
        database.execute("PRAGMA page_size = 1024")
        database.executescript(_SCHEMA)
        _fill(database, make_office(seed))
        database.commit()
        return database.serialize()
    finally:
        database.close()


def _fill(database: sqlite3.Connection, office: Office) -> None:
    def insert(table: str, rows: list[tuple[Any, ...]]) -> None:
        marks = ", ".join("?" * len(rows[0]))
        database.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)  # noqa: S608 - our own table names

    insert("customers", [(c.customer_id, c.name, c.city, c.email) for c in office.customers])
    insert("products", [(p.sku, p.name, p.price_cents, p.price_cents) for p in office.products])
    insert("stock", [(sku, warehouse, pieces) for (sku, warehouse), pieces in office.stock.items()])
    insert("colleagues", [(c.email, c.name, c.team) for c in office.colleagues])
    insert("orders", [(o.order_id, o.customer_id, o.status, o.placed, o.warehouse) for o in office.orders])
    insert("order_lines", [(None, o.order_id, line.sku, line.quantity) for o in office.orders for line in o.lines])
    insert("mail", [(m.mail_id, m.folder, m.sender, m.recipient, m.subject, m.body, m.day) for m in office.mail])
    insert("events", [(e.event_id, e.title, e.day, e.start, e.minutes, json.dumps(e.attendees)) for e in office.events])
