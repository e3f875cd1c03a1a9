"""Jobs about orders, prices and stock."""

import re
from typing import Any

from gymckpt.tasksets.jobs import Draw, Job, JobKind, Plan, PlanLost, call, one, other_warehouse, rows_of, value
from gymckpt.tasksets.office import WAREHOUSES


def _make_new_order(draw: Draw) -> Job:
    customer, first, second = draw.customer(), draw.product(), draw.product()
    order_id = draw.order_id()
    warehouse = draw.chance.choice(WAREHOUSES)
    a = draw.chance.randint(1, max(1, min(9, draw.office.stock[first.sku, warehouse] - 1)))
    b = draw.chance.randint(1, max(1, min(9, draw.office.stock[second.sku, warehouse] - 1)))
    return Job(
        f"Create an order for {customer.name} with {a} x {first.name} and {b} x {second.name}, "
        f"and ship it from {warehouse}.",
        [
            [call("find_customer", name=customer.name)],
            [call("find_product", name=first.name), call("find_product", name=second.name)],
            [call("create_order", customer_id=customer.customer_id)],
            [call("add_order_line", order_id=order_id, sku=first.sku, quantity=a)],
            [call("add_order_line", order_id=order_id, sku=second.sku, quantity=b)],
            [call("ship_order", order_id=order_id, warehouse=warehouse)],
        ],
    )


def _plan_new_order(match: re.Match[str]) -> Plan:
    customer, a, first, b, second, warehouse = match.groups()
    (found,) = yield [call("find_customer", name=customer)]
    customer_id = one(found, "customers", customer)["customer_id"]
    products = yield [call("find_product", name=first), call("find_product", name=second)]
    skus = [one(output, "products", name)["sku"] for output, name in zip(products, (first, second), strict=True)]
    (created,) = yield [call("create_order", customer_id=customer_id)]
    order_id = value(created, "order_id")
    for sku, quantity in zip(skus, (a, b), strict=True):
        yield [call("add_order_line", order_id=order_id, sku=sku, quantity=int(quantity))]
    yield [call("ship_order", order_id=order_id, warehouse=warehouse)]


def _make_restock(draw: Draw) -> Job:
    product, warehouse = draw.product(), draw.chance.choice(WAREHOUSES)
    target = other_warehouse(draw.chance, warehouse)
    held = draw.office.stock[product.sku, warehouse]
    threshold = max(2, held + draw.chance.choice((-3, -2, -1, 1, 2, 3)))
    bought, moved = draw.chance.randint(10, 40), draw.chance.randint(1, 3)
    if held < threshold:
        act = call("reorder_stock", sku=product.sku, warehouse=warehouse, quantity=bought)
    else:
        act = call("transfer_stock", sku=product.sku, source=warehouse, target=target, quantity=moved)
    return Job(
        f"If there are fewer than {threshold} x {product.name} in {warehouse}, buy {bought} more for that warehouse; "
        f"otherwise move {moved} of them to {target}.",
        [[call("find_product", name=product.name)], [call("get_stock", sku=product.sku)], [act]],
    )


def _plan_restock(match: re.Match[str]) -> Plan:
    threshold, product, warehouse, bought, moved, target = match.groups()
    (found,) = yield [call("find_product", name=product)]
    sku = one(found, "products", product)["sku"]
    (stock,) = yield [call("get_stock", sku=sku)]
    held = value(value(stock, "pieces"), warehouse)
    if held < int(threshold):
        yield [call("reorder_stock", sku=sku, warehouse=warehouse, quantity=int(bought))]
    else:
        yield [call("transfer_stock", sku=sku, source=warehouse, target=target, quantity=int(moved))]


def _make_cancel(draw: Draw) -> Job:
    customer = draw.customer()
    day = f"2031-02-{draw.chance.randint(12, 28):02d}"
    old = [order for order in draw.office.open_orders(customer.customer_id) if order.placed < day]
    return Job(
        f"Cancel every open order of {customer.name} that was placed before {day}, "
        "and write how many these were into the customer's file as 'Cancelled orders: N'.",
        [
            [call("find_customer", name=customer.name)],
            [call("list_orders", customer_id=customer.customer_id, status="open")],
            *([call("cancel_order", order_id=order.order_id)] for order in old),
            [call("add_note", customer_id=customer.customer_id, text=f"Cancelled orders: {len(old)}")],
        ],
    )


def _plan_cancel(match: re.Match[str]) -> Plan:
    customer, day = match.groups()
    (found,) = yield [call("find_customer", name=customer)]
    customer_id = one(found, "customers", customer)["customer_id"]
    (listed,) = yield [call("list_orders", customer_id=customer_id, status="open")]
    old = [order["order_id"] for order in rows_of(listed, "orders") if order["placed"] < day]
    for order_id in old:
        yield [call("cancel_order", order_id=order_id)]
    yield [call("add_note", customer_id=customer_id, text=f"Cancelled orders: {len(old)}")]


def _make_price(draw: Draw) -> Job:
    product, percent = draw.product(), draw.chance.choice((4, 5, 8, 10, 12, 15))
    price_cents = product.price_cents * (100 + percent) // 100
    return Job(
        f"Raise the price of the {product.name} by {percent} percent, rounded down to whole cents.",
        [[call("find_product", name=product.name)], [call("set_price", sku=product.sku, price_cents=price_cents)]],
    )


def _plan_price(match: re.Match[str]) -> Plan:
    product, percent = match.groups()
    (found,) = yield [call("find_product", name=product)]
    row = one(found, "products", product)
    yield [call("set_price", sku=row["sku"], price_cents=row["price_cents"] * (100 + int(percent)) // 100)]


def _make_total(draw: Draw) -> Job:
    customer, office = draw.customer(), draw.office
    colleague = draw.chance.choice(office.colleagues)
    prices = {product.sku: product.price_cents for product in office.products}
    orders = office.open_orders(customer.customer_id)
    cents = sum(line.quantity * prices[line.sku] for order in orders for line in order.lines)
    return Job(
        f"Add up what the open orders of {customer.name} are worth by the prices of this morning, and mail the "
        f"total to {colleague.name} with the subject 'Open orders of {customer.name}' and the text 'Total: N cents'.",
        [
            [call("find_customer", name=customer.name), call("find_colleague", name=colleague.name)],
            [call("list_orders", customer_id=customer.customer_id, status="open")],
            *([call("get_order", order_id=order.order_id)] for order in orders),
            [
                call(
                    "send_mail",
                    recipient=colleague.email,
                    subject=f"Open orders of {customer.name}",
                    body=f"Total: {cents} cents",
                )
            ],
        ],
    )


def _plan_total(match: re.Match[str]) -> Plan:
    customer, colleague, subject = match.groups()
    found = yield [call("find_customer", name=customer), call("find_colleague", name=colleague)]
    customer_id = one(found[0], "customers", customer)["customer_id"]
    recipient = one(found[1], "colleagues", colleague)["email"]
    (listed,) = yield [call("list_orders", customer_id=customer_id, status="open")]
    cents = 0
    for order in rows_of(listed, "orders"):
        (shown,) = yield [call("get_order", order_id=order["order_id"])]
        cents += sum(_line_cents(line) for line in rows_of(shown, "lines"))
    yield [call("send_mail", recipient=recipient, subject=subject, body=f"Total: {cents} cents")]


def _line_cents(line: dict[str, Any]) -> int:
    quantity, price_cents = line.get("quantity"), line.get("opening_price_cents")
    if not isinstance(quantity, int) or not isinstance(price_cents, int):
        raise PlanLost
    return quantity * price_cents


_NAME = r"([A-Z][a-z]+ [A-Z][a-z]+)"
_PRODUCT = r"([a-z]+ [a-z]+)"
_WAREHOUSE = r"([A-Z][a-z]+)"

TRADE_JOBS = (
    JobKind(
        "new_order",
        _make_new_order,
        re.compile(
            rf"Create an order for {_NAME} with (\d+) x {_PRODUCT} and (\d+) x {_PRODUCT}, "
            rf"and ship it from {_WAREHOUSE}\."
        ),
        _plan_new_order,
    ),
    JobKind(
        "restock",
        _make_restock,
        re.compile(
            rf"If there are fewer than (\d+) x {_PRODUCT} in {_WAREHOUSE}, buy (\d+) more for that warehouse; "
            rf"otherwise move (\d+) of them to {_WAREHOUSE}\."
        ),
        _plan_restock,
    ),
    JobKind(
        "cancel",
        _make_cancel,
        re.compile(rf"Cancel every open order of {_NAME} that was placed before (\d{{4}}-\d\d-\d\d),"),
        _plan_cancel,
    ),
    JobKind("price", _make_price, re.compile(rf"Raise the price of the {_PRODUCT} by (\d+) percent"), _plan_price),
    JobKind(
        "total",
        _make_total,
        re.compile(
            rf"Add up what the open orders of {_NAME} are worth .* mail the total to {_NAME} with the subject '([^']+)'"
        ),
        _plan_total,
    ),
)
