"""The first tables: jobs, attempts, bindings; callers, people, tokens; settings; the leader's row."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

LIVE = sa.text("state IN ('PENDING', 'QUEUED', 'RUNNING')")
DONE = sa.text("state IN ('CANCELLED', 'FAILED', 'SUCCEEDED')")


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("n", sa.Integer, primary_key=True),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("caller", sa.String, nullable=False),
        sa.Column("person", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("retry_count", sa.Integer, nullable=False),
        sa.Column("infra_retries", sa.Integer, nullable=False),
        sa.Column("cancel_requested", sa.Integer, nullable=False),
        sa.Column("submitted_at", sa.Float, nullable=False),
        sa.Column("updated_at", sa.Float, nullable=False),
        sa.Column("sku", sa.String, nullable=False),
        sa.Column("queue", sa.String, nullable=False),
        sa.Column("run", sa.String),
        sa.Column("key", sa.String),
        sa.Column("body_digest", sa.String, nullable=False),
        sa.Column("attempt", sa.String),
        sa.Column("token", sa.String),
        sa.Column("path", sa.String),
        sa.Column("why_not_warmer", sa.String, nullable=False),
        sa.Column("pods", sa.Text, nullable=False),
        sa.Column("retire_after", sa.Text, nullable=False),
        sa.Column("labels", sa.Text, nullable=False),
        sa.Column("result_blob", sa.String),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("facts", sa.Text, nullable=False),
        sa.Column("result", sa.LargeBinary),
    )
    op.create_index("jobs_id", "jobs", ["id"], unique=True)
    op.create_index("jobs_key", "jobs", ["caller", "key"], unique=True, sqlite_where=sa.text("key IS NOT NULL"))
    op.create_index("jobs_run", "jobs", ["caller", "run", "state"])
    op.create_index("jobs_live", "jobs", ["caller", "seq"], sqlite_where=LIVE)
    op.create_index("jobs_done", "jobs", ["caller", "seq"], sqlite_where=DONE)
    op.create_table(
        "attempts",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("job", sa.String, nullable=False),
        sa.Column("outcome", sa.String, nullable=False),
        sa.Column("started_at", sa.Float, nullable=False),
        sa.Column("ended_at", sa.Float, nullable=False),
        sa.Column("path", sa.String),
        sa.Column("pods", sa.Text, nullable=False),
        sa.Column("facts", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "bindings",
        sa.Column("n", sa.Integer, primary_key=True),
        sa.Column("pod", sa.String, nullable=False),
        sa.Column("attempt", sa.String, nullable=False),
        sa.Column("job", sa.String, nullable=False),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("caller", sa.String, nullable=False),
        sa.Column("queue", sa.String, nullable=False),
        sa.Column("tag", sa.String),
        sa.Column("retire_after", sa.Integer, nullable=False),
    )
    op.create_index("bindings_pod", "bindings", ["pod"])
    op.create_table(
        "callers",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("limits", sa.JSON, nullable=False),
    )
    op.create_table(
        "people",
        sa.Column("caller", sa.String, primary_key=True),
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("caller", sa.String, nullable=False),
        sa.Column("person", sa.String, nullable=False),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
        sa.Column("revoked_at", sa.Float),
    )
    op.create_index(
        "tokens_name", "tokens", ["caller", "name"], unique=True, sqlite_where=sa.text("revoked_at IS NULL")
    )
    op.create_table(
        "settings",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("body", sa.JSON, nullable=False),
        sa.Column("updated_at", sa.Float, nullable=False),
    )
    op.create_table(
        "leader",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("since", sa.Float, nullable=False),
        sa.CheckConstraint("id = 1", name="leader_is_one_row"),
    )
    op.execute("INSERT INTO leader (id, epoch, seq, pid, since) VALUES (1, 0, 0, 0, 0)")
