"""Views over changing tables, kept up to date by changes.

    from penstock.spark import flow, stream, topic, views

    @flow(inputs=[stream("shop.orders", debezium=ORDERS),
                  stream("shop.customers", debezium=CUSTOMERS)],
          output=topic("revenue", key="_key", compacted=True))
    def revenue(orders, customers):
        return views.sql(
            "SELECT country, count(*) AS n, sum(amount) AS revenue FROM orders "
            "JOIN customers ON orders.customer_id = customers.id GROUP BY country",
            keys={"orders": "id", "customers": "id"}, orders=orders, customers=customers,
        ).changes()

**What comes out** is a changelog: for each micro-batch the rows of the view that are other than
before, by the view's key, and those that are gone, with `_deleted`. At every moment it is what a
batch query over the tables would give, as they stand in the log where the micro-batch ends.

**How.** Each change of a row is the row as it was, going, and the row as it is, coming. Filters and
projections treat both alike; joins change by what the two sides' changes bring together; groups
add and take away, exactly. So the work is that of the changes, not of the tables. Between stages
rows are brought together by primary key, join key and group. What is kept: of each table the
columns that the view needs, by primary key; of each side of a join its rows by join key; of each
group its partial results, and for min, max and count(DISTINCT) its values.

**Keys.** The key of a view with GROUP BY is what it groups by; of others the primary keys of its
tables together, null for the missing side of a left join. Columns of the key that the view does
not show begin with `_`. `_key` is the whole key as a JSON object, as capture writes keys: the key
to give to the topic, for one column alone may be null.
"""

from __future__ import annotations

from penstock.spark.views.frames import Grouped, View, of, sql
from penstock.spark.views.refusing import ViewError

__all__ = ["Grouped", "View", "ViewError", "of", "sql"]
