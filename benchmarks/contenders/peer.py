"""What the peers share: their task's one INSERT, and the plan as a cron line."""

from benchmarks.plan import Plan


CREATE = "CREATE TABLE witness (name text, fire_time double precision)"
INSERT = "INSERT INTO witness (name, fire_time) VALUES (%(name)s, %(fire_time)s)"


def cron_fields(plan: Plan, number: int) -> list[str]:
    """Return a cron line of six fields, the seconds first, for a schedule whose period divides a minute."""
    if plan.every == 60:
        return [str(plan.phase(number)), *"*****"]
    if plan.every == 1:
        return [*"******"]
    seconds = [second for second in range(60) if (second - plan.phase(number)) % plan.every == 0]
    return [",".join(map(str, seconds)), *"*****"]
