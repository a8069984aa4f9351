# One replica of tickd with the example schedule. Mount your own over /etc/tickd, or name it in TICKD_SCHEDULE.

FROM python:3.11-slim AS build
WORKDIR /build
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m venv /opt/tickd \
    && /opt/tickd/bin/pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt . \
    && /opt/tickd/bin/pip uninstall --yes --quiet pip setuptools

FROM python:3.11-slim
COPY --from=build /opt/tickd /opt/tickd
COPY config /etc/tickd
ENV PATH=/opt/tickd/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    TICKD_HTTP=0.0.0.0:8080 \
    TICKD_SCHEDULE=/etc/tickd/schedule.yaml
EXPOSE 8080
# A number, so that an orchestrator can see that it is not root. tickd writes no file, and needs no entry in passwd.
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["/opt/tickd/bin/python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ['TICKD_HTTP'].rpartition(':')[2] + '/live', timeout=4)"]
# No shell in between: tickd is process 1 itself, and SIGTERM reaches it.
ENTRYPOINT ["/opt/tickd/bin/tickd"]
CMD ["run"]
