"""The workbench's tools: what each does to a database."""

import json
import sqlite3
from collections.abc import Callable
from typing import Any

from gymckpt.tasksets.office import OFFICE_ADDRESS, SUPPLIER, TODAY, WAREHOUSES
from gymckpt.tasksets.workbench_tools import WORKBENCH_TOOLS

Arguments = dict[str, Any]
_TYPES: dict[str, type | tuple[type, ...]] = {"string": str, "integer": int, "array": list, "null": type(None)}
_SCHEMAS = {tool["name"]: tool["parameters"]["properties"] for tool in WORKBENCH_TOOLS}


class ToolRefused(Exception):
    """What the model asked for cannot be done; the text is for the model."""


def run_tool(database: sqlite3.Connection, name: str, arguments: Arguments) -> dict[str, Any]:
    """Do the call, wholly or not at all; a refusal is an answer too: `{"error": text}`."""
    try:
        _check(name, arguments)
        with database:
            return _TOOLS[name](database, arguments)
    except ToolRefused as refusal:
        return {"error": str(refusal)}
    except OverflowError:
        return {"error": "a number is too large"}


def _check(name: str, arguments: Arguments) -> None:
    schema = _SCHEMAS[name]
    if wrong := arguments.keys() ^ schema.keys():
        raise ToolRefused(f"{name} takes exactly the arguments {', '.join(schema)}; see {', '.join(sorted(wrong))}")
    for key, rule in schema.items():
        given, kinds = arguments[key], rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
        if isinstance(given, bool) or not any(isinstance(given, _TYPES[kind]) for kind in kinds):
            raise ToolRefused(f"{key} is not of type {' or '.join(kinds)}")
        if "minimum" in rule and given < rule["minimum"]:
            raise ToolRefused(f"{key} must be at least {rule['minimum']}")
        if kinds == ["array"] and not all(isinstance(item, str) for item in given):
            raise ToolRefused(f"{key} is not a list of strings")


def _rows(database: sqlite3.Connection, query: str, *values: Any) -> list[dict[str, Any]]:
    cursor = database.execute(query, values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def _row(database: sqlite3.Connection, what: str, query: str, *values: Any) -> dict[str, Any]:
    rows = _rows(database, query, *values)
    if not rows:
        raise ToolRefused(f"there is no {what} {values[0]!r}")
    return rows[0]


def _find(table: str, key: str, columns: str) -> Callable[[sqlite3.Connection, Arguments], dict[str, Any]]:
    query = f"SELECT {columns} FROM {table} WHERE instr(lower(name), lower(?)) ORDER BY name"  # noqa: S608 - our names

    def find(database: sqlite3.Connection, arguments: Arguments) -> dict[str, Any]:
        return {key: _rows(database, query, arguments["name"])}

    return find


def _get_stock(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    product = _row(database, "product", "SELECT sku, name FROM products WHERE sku = ?", a["sku"])
    pieces = database.execute("SELECT warehouse, pieces FROM stock WHERE sku = ? ORDER BY warehouse", (a["sku"],))
    return {**product, "pieces": dict(pieces.fetchall())}


def _list_orders(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    query = (
        "SELECT order_id, status, placed FROM orders WHERE customer_id = ? AND (? IS NULL OR status = ?) "
        "ORDER BY order_id"
    )
    return {"orders": _rows(database, query, a["customer_id"], a["status"], a["status"])}


def _get_order(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    order = _row(database, "order", "SELECT * FROM orders WHERE order_id = ?", a["order_id"])
    query = (
        "SELECT sku, name, quantity, price_cents, opening_price_cents FROM order_lines JOIN products USING (sku) "
        "WHERE order_id = ? ORDER BY line_id"
    )
    return {**order, "lines": _rows(database, query, a["order_id"])}


def _open_order(database: sqlite3.Connection, order_id: int) -> dict[str, Any]:
    order = _row(database, "order", "SELECT * FROM orders WHERE order_id = ?", order_id)
    if order["status"] != "open":
        raise ToolRefused(f"order {order_id} is {order['status']}, not open")
    return order


def _create_order(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    _row(database, "customer", "SELECT name FROM customers WHERE customer_id = ?", a["customer_id"])
    query = "INSERT INTO orders (customer_id, status, placed) VALUES (?, 'open', ?)"
    return {"order_id": database.execute(query, (a["customer_id"], TODAY)).lastrowid}


def _add_order_line(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    _open_order(database, a["order_id"])
    _row(database, "product", "SELECT name FROM products WHERE sku = ?", a["sku"])
    query = "INSERT INTO order_lines (order_id, sku, quantity) VALUES (?, ?, ?)"
    database.execute(query, (a["order_id"], a["sku"], a["quantity"]))
    return {"order_id": a["order_id"], "added": a["quantity"]}


def _ship_order(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    _open_order(database, a["order_id"])
    _check_warehouse(a["warehouse"])
    query = "SELECT sku, sum(quantity) AS quantity FROM order_lines WHERE order_id = ? GROUP BY sku"
    lines = _rows(database, query, a["order_id"])
    if not lines:
        raise ToolRefused(f"order {a['order_id']} is empty")
    for line in lines:
        _take(database, line["sku"], a["warehouse"], line["quantity"])
    query = "UPDATE orders SET status = 'shipped', warehouse = ? WHERE order_id = ?"
    database.execute(query, (a["warehouse"], a["order_id"]))
    return {"order_id": a["order_id"], "status": "shipped"}


def _cancel_order(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    _open_order(database, a["order_id"])
    database.execute("UPDATE orders SET status = 'cancelled' WHERE order_id = ?", (a["order_id"],))
    return {"order_id": a["order_id"], "status": "cancelled"}


def _check_warehouse(warehouse: str) -> None:
    if warehouse not in WAREHOUSES:
        raise ToolRefused(f"there is no warehouse {warehouse!r}: {', '.join(WAREHOUSES)}")


def _take(database: sqlite3.Connection, sku: str, warehouse: str, quantity: int) -> None:
    query = "UPDATE stock SET pieces = pieces - ? WHERE sku = ? AND warehouse = ? AND pieces >= ?"
    if database.execute(query, (quantity, sku, warehouse, quantity)).rowcount != 1:
        raise ToolRefused(f"{warehouse} has fewer than {quantity} of {sku}")


def _transfer_stock(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    _check_warehouse(a["source"])
    _check_warehouse(a["target"])
    _take(database, a["sku"], a["source"], a["quantity"])
    query = "UPDATE stock SET pieces = pieces + ? WHERE sku = ? AND warehouse = ?"
    database.execute(query, (a["quantity"], a["sku"], a["target"]))
    return _get_stock(database, a)


def _reorder_stock(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    _check_warehouse(a["warehouse"])
    _row(database, "product", "SELECT name FROM products WHERE sku = ?", a["sku"])
    query = "INSERT INTO purchases (supplier, sku, warehouse, quantity) VALUES (?, ?, ?, ?)"
    cursor = database.execute(query, (SUPPLIER, a["sku"], a["warehouse"], a["quantity"]))
    return {"purchase_id": cursor.lastrowid, "supplier": SUPPLIER}


def _set_price(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    query = "UPDATE products SET price_cents = ? WHERE sku = ?"
    if database.execute(query, (a["price_cents"], a["sku"])).rowcount != 1:
        raise ToolRefused(f"there is no product {a['sku']!r}")
    return {"sku": a["sku"], "price_cents": a["price_cents"]}


def _add_note(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    _row(database, "customer", "SELECT name FROM customers WHERE customer_id = ?", a["customer_id"])
    cursor = database.execute("INSERT INTO notes (customer_id, text) VALUES (?, ?)", (a["customer_id"], a["text"]))
    return {"note_id": cursor.lastrowid}


def _search_mail(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    query = (
        "SELECT mail_id, sender, subject, day FROM mail WHERE folder = 'inbox' AND instr(lower(sender), lower(?)) "
        "ORDER BY mail_id"
    )
    return {"mails": _rows(database, query, a["sender"])}


def _read_mail(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    return _row(database, "mail", "SELECT * FROM mail WHERE mail_id = ?", a["mail_id"])


def _send_mail(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    query = "INSERT INTO mail (folder, sender, recipient, subject, body, day) VALUES ('outbox', ?, ?, ?, ?, ?)"
    values = (OFFICE_ADDRESS, a["recipient"], a["subject"], a["body"], TODAY)
    return {"mail_id": database.execute(query, values).lastrowid}


def _archive_mail(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    if database.execute("UPDATE mail SET folder = 'archive' WHERE mail_id = ?", (a["mail_id"],)).rowcount != 1:
        raise ToolRefused(f"there is no mail {a['mail_id']}")
    return {"mail_id": a["mail_id"], "folder": "archive"}


def _list_events(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    events = _rows(database, "SELECT * FROM events WHERE day = ? ORDER BY start, event_id", a["day"])
    return {"events": [{**event, "attendees": json.loads(event["attendees"])} for event in events]}


def _create_event(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    query = "INSERT INTO events (title, day, start, minutes, attendees) VALUES (?, ?, ?, ?, ?)"
    values = (a["title"], a["day"], a["start"], a["minutes"], json.dumps(a["attendees"]))
    return {"event_id": database.execute(query, values).lastrowid}


def _move_event(database: sqlite3.Connection, a: Arguments) -> dict[str, Any]:
    query = "UPDATE events SET day = ?, start = ? WHERE event_id = ?"
    if database.execute(query, (a["day"], a["start"], a["event_id"])).rowcount != 1:
        raise ToolRefused(f"there is no event {a['event_id']}")
    return {"event_id": a["event_id"], "day": a["day"], "start": a["start"]}


_TOOLS: dict[str, Callable[[sqlite3.Connection, Arguments], dict[str, Any]]] = {
    "find_customer": _find("customers", "customers", "customer_id, name, city, email"),
    "find_product": _find("products", "products", "sku, name, price_cents"),
    "find_colleague": _find("colleagues", "colleagues", "name, email, team"),
    "get_stock": _get_stock,
    "list_orders": _list_orders,
    "get_order": _get_order,
    "create_order": _create_order,
    "add_order_line": _add_order_line,
    "ship_order": _ship_order,
    "cancel_order": _cancel_order,
    "transfer_stock": _transfer_stock,
    "reorder_stock": _reorder_stock,
    "set_price": _set_price,
    "add_note": _add_note,
    "search_mail": _search_mail,
    "read_mail": _read_mail,
    "send_mail": _send_mail,
    "archive_mail": _archive_mail,
    "list_events": _list_events,
    "create_event": _create_event,
    "move_event": _move_event,
}
TOOL_NAMES = tuple(_TOOLS)
"""Every tool."""
