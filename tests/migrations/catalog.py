"""What a database's catalog says about its tables, in a form that can be compared."""

from typing import Any

from .hosts import Host

Catalog = dict[str, dict[tuple[str, ...], Any]]

# Django's own tables are not ours to compare.
TABLES = """
SELECT pg_class.oid AS table_id, relname, relkind, relpersistence FROM pg_class
JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE nspname = %s AND relkind IN ('r', 'p', 'v', 'm', 'S', 'f') AND relname NOT LIKE 'django\\_%%'
"""

QUERIES = {
    "relations": f"SELECT relname, ROW(relkind, relpersistence)::text FROM ({TABLES}) AS tables",
    # In order: dropped columns leave gaps in attnum, so the place is counted.
    "columns": f"""
SELECT relname, attname, ROW(
  row_number() OVER (PARTITION BY attrelid ORDER BY attnum), format_type(atttypid, atttypmod), attnotnull,
  pg_get_expr(adbin, adrelid), attidentity, attgenerated, attcollation::regcollation
)::text
FROM ({TABLES}) AS tables JOIN pg_attribute ON attrelid = table_id
LEFT JOIN pg_attrdef ON adrelid = table_id AND adnum = attnum
WHERE attnum > 0 AND NOT attisdropped
""",
    # PostgreSQL 18 has NOT NULL as constraints too; the columns tell that already.
    "constraints": f"""
SELECT relname, conname, ROW(contype, pg_get_constraintdef(pg_constraint.oid), convalidated)::text
FROM ({TABLES}) AS tables JOIN pg_constraint ON conrelid = table_id WHERE contype <> 'n'
""",
    "indexes": f"""
SELECT tables.relname, pg_class.relname, ROW(pg_get_indexdef(indexrelid), indisvalid, indisready)::text
FROM ({TABLES}) AS tables JOIN pg_index ON indrelid = table_id JOIN pg_class ON pg_class.oid = indexrelid
""",
    "triggers": f"""
SELECT relname, tgname, pg_get_triggerdef(pg_trigger.oid)
FROM ({TABLES}) AS tables JOIN pg_trigger ON tgrelid = table_id WHERE NOT tgisinternal
""",
}


def catalog(host: Host, schema: str = "public") -> Catalog:
    """Return all relations of a schema but Django's own, with their columns, constraints and so on.

    Each kind is a dictionary from names (table and, if it has one, its own) to what PostgreSQL says it is.
    """
    return {
        kind: {tuple(names): definition for *names, definition in host.rows(query, [schema])}
        for kind, query in QUERIES.items()
    }
