"""What the peers share: their task's one INSERT, and the plan as a cron line."""

from benchmarks.plan import DAY, Plan


CREATE = "CREATE TABLE witness (name text, fire_time double precision)"
INSERT = "INSERT INTO witness (name, fire_time) VALUES (%(name)s, %(fire_time)s)"


def cron_fields(plan: Plan, number: int) -> list[str]:
    """Return a cron line of six fields, the seconds first, for a schedule whose period divides a minute or is a day."""
    period, phase = plan.period(number), plan.phase(number)
    if period == DAY:
        return [str(phase % 60), str(phase // 60 % 60), str(phase // 3600), *"***"]
    if 60 % period:
        raise SystemExit(f"no cron line can say every {period} s")
    if period == 1:
        return [*"******"]
    return [",".join(map(str, range(phase, 60, period))), *"*****"]
