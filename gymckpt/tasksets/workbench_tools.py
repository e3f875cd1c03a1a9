"""The tools of the workbench, as a model sees them."""

from typing import Any

_STRING: dict[str, Any] = {"type": "string"}
_INTEGER: dict[str, Any] = {"type": "integer"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1}
_DAY: dict[str, Any] = {"type": "string", "description": "YYYY-MM-DD"}
_TIME: dict[str, Any] = {"type": "string", "description": "HH:MM"}


def _tool(name: str, description: str, /, **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        },
        "strict": True,
    }


WORKBENCH_TOOLS: tuple[dict[str, Any], ...] = (
    _tool("find_customer", "Customers whose name contains the text.", name=_STRING),
    _tool("find_product", "Products whose name contains the text, with sku and price in cents.", name=_STRING),
    _tool("find_colleague", "Colleagues whose name contains the text, with their e-mail address.", name=_STRING),
    _tool("get_stock", "Pieces of a product in each warehouse.", sku=_STRING),
    _tool(
        "list_orders",
        "A customer's orders, oldest first.",
        customer_id=_STRING,
        status={"type": ["string", "null"], "enum": ["open", "shipped", "cancelled", None]},
    ),
    _tool("get_order", "One order with its lines and prices.", order_id=_INTEGER),
    _tool("create_order", "A new, empty, open order.", customer_id=_STRING),
    _tool(
        "add_order_line", "Add pieces of a product to an open order.", order_id=_INTEGER, sku=_STRING, quantity=_COUNT
    ),
    _tool(
        "ship_order", "Ship an open order from a warehouse that has all of it.", order_id=_INTEGER, warehouse=_STRING
    ),
    _tool("cancel_order", "Cancel an open order.", order_id=_INTEGER),
    _tool(
        "transfer_stock",
        "Move pieces from one warehouse to another.",
        sku=_STRING,
        source=_STRING,
        target=_STRING,
        quantity=_COUNT,
    ),
    _tool(
        "reorder_stock",
        "Buy pieces from the supplier for a warehouse.",
        sku=_STRING,
        warehouse=_STRING,
        quantity=_COUNT,
    ),
    _tool("set_price", "Change a product's price.", sku=_STRING, price_cents=_COUNT),
    _tool("add_note", "Write a note into a customer's file.", customer_id=_STRING, text=_STRING),
    _tool("search_mail", "Mails in the inbox from a sender, newest id last, without their text.", sender=_STRING),
    _tool("read_mail", "One mail with its text.", mail_id=_INTEGER),
    _tool("send_mail", "Send a mail.", recipient=_STRING, subject=_STRING, body=_STRING),
    _tool("archive_mail", "Move a mail to the archive.", mail_id=_INTEGER),
    _tool("list_events", "The calendar of one day.", day=_DAY),
    _tool(
        "create_event",
        "A new calendar entry.",
        title=_STRING,
        day=_DAY,
        start=_TIME,
        minutes=_COUNT,
        attendees={"type": "array", "items": {"type": "string", "description": "e-mail address"}},
    ),
    _tool("move_event", "Move a calendar entry.", event_id=_INTEGER, day=_DAY, start=_TIME),
)
"""Function tools of the Responses API, with strict schemas."""
