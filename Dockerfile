# Targets: `relay` (the last one, and so the default), `console`, and `spark` with Java, PySpark and the jobs.
# `make image` and `make image TARGET=console` build them; docs/container.md tells how to run them.
# All stages have the same base. By digest: --build-arg BASE=python:3.13-slim-trixie@sha256:...
ARG BASE=python:3.13-slim-trixie

# Build with: everything that only the build needs stays in this stage.
FROM ${BASE} AS tools
# A private index, with its proxy and certificates: --secret id=pip.conf,src=... ; it leaves no trace in a layer.
ENV PIP_CONFIG_FILE=/run/secrets/pip.conf PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY requirements/build.txt requirements/
RUN --mount=type=secret,id=pip.conf \
    python3 -m venv /tools && /tools/bin/pip install --quiet --require-hashes -r requirements/build.txt

FROM tools AS wheel
# The codec is compiled: gcc, and Debian's own Python has its headers in a separate package.
RUN apt-get update --quiet=2 \
    && headers=$(python3 -c 'import os, sysconfig; print("" if os.path.exists(sysconfig.get_path("include") + "/Python.h") else "python3-dev")') \
    && DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends gcc libc6-dev $headers
COPY LICENSE README.md hatch_build.py pyproject.toml ./
COPY config config
COPY docs/runbooks docs/runbooks
COPY examples examples
COPY migrations migrations
COPY relay relay
COPY spark spark
RUN OUTBOX_RELAY_CODEC=compiled /tools/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheel .

# The locked dependencies first: they change less often than the project, and their layer is kept.
FROM tools AS installed
# Those of `relay` and its extra `otel`: whether traces are sent is told by variables, not by another image.
COPY requirements/otel.txt requirements/
RUN --mount=type=secret,id=pip.conf \
    python3 -m venv --without-pip /opt/relay \
    && /tools/bin/pip --python /opt/relay install --quiet --require-hashes --only-binary :all: --no-compile \
        -r requirements/otel.txt
COPY --from=wheel /wheel /wheel
# Compiled here for good, as nothing can be written later. The files' times are not compared: a copy may change them.
RUN /tools/bin/pip --python /opt/relay install --quiet --no-deps --no-index --no-compile /wheel/*.whl \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/relay

FROM tools AS console-installed
COPY requirements/console.txt requirements/
RUN --mount=type=secret,id=pip.conf \
    python3 -m venv --without-pip /opt/relay \
    && /tools/bin/pip --python /opt/relay install --quiet --require-hashes --only-binary :all: --no-compile \
        -r requirements/console.txt
COPY --from=wheel /wheel /wheel
RUN /tools/bin/pip --python /opt/relay install --quiet --no-deps --no-index --no-compile /wheel/*.whl \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/relay

FROM tools AS spark-installed
COPY requirements/spark.txt requirements/
# PySpark comes as source, so wheels are made of all; it builds with the pinned tools, as everything here does.
RUN --mount=type=secret,id=pip.conf \
    /tools/bin/pip wheel --quiet --require-hashes --no-deps --no-build-isolation --wheel-dir /wheels \
        -r requirements/spark.txt \
    && python3 -m venv --without-pip /opt/spark \
    && /tools/bin/pip --python /opt/spark install --quiet --no-deps --no-index --no-compile /wheels/*.whl \
    && rm -r /wheels
COPY --from=wheel /wheel /wheel
RUN /tools/bin/pip --python /opt/spark install --quiet --no-deps --no-index --no-compile /wheel/*.whl \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/spark \
    && cd /opt/spark \
    && ln -s lib/python3*/site-packages/outbox_spark/jobs lib/python3*/site-packages/relay/examples .

FROM ${BASE} AS spark
ARG JAVA=openjdk-21-jre-headless
# tini as PID 1, since Java does not reap what Spark's Python workers leave; a name for the user, which Hadoop asks for.
# Java's package fails without the folder of manual pages, which slim images lack.
RUN mkdir -p /usr/share/man/man1 \
    && apt-get update --quiet=2 \
    && DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends ${JAVA} tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log \
    && echo 'spark:x:10001:10001:spark:/tmp:/usr/sbin/nologin' >> /etc/passwd
COPY --from=spark-installed /opt/spark /opt/spark
COPY config/spark-entrypoint /opt/spark/bin/spark-entrypoint
ENV PATH=/opt/spark/bin:$PATH PYSPARK_PYTHON=/opt/spark/bin/python PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/spark
USER 10001:10001
ENTRYPOINT ["tini", "-g", "--", "spark-entrypoint"]
CMD ["--help"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="outbox-relay-spark" \
    org.opencontainers.image.description="Spark with the data source that writes business rows and outbox rows in one transaction" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"

# An init as PID 1: the kernel keeps from PID 1 every signal that it has no handler for, and Python has none at first.
# tini blocks signals with its first instructions, and hands each one on.
FROM ${BASE} AS init
RUN apt-get update --quiet=2 \
    && DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends tini

FROM ${BASE} AS console
COPY --from=init /usr/bin/tini-static /usr/bin/tini
COPY --from=console-installed /opt/relay /opt/relay
RUN ["/opt/relay/bin/python", "-c", "import relay.cli.console"]
ENV PATH=/opt/relay/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
# For each client that can reach the container: it does not start without authentication (docs/console.md).
ENV RELAY_CONSOLE_LISTEN=0.0.0.0:8420
EXPOSE 8420
ENTRYPOINT ["tini", "--", "relay"]
CMD ["console"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="outbox-relay-console" \
    org.opencontainers.image.description="Web console of the transactional outbox relay" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"

FROM ${BASE} AS relay
COPY --from=init /usr/bin/tini-static /usr/bin/tini
COPY --from=installed /opt/relay /opt/relay
# Images of Python come without the bytecode of its library: imported once here, it is not compiled at every start.
RUN ["/opt/relay/bin/python", "-c", "import relay.cli.run, relay.cli.migrate, relay.cli.status, relay.probes.server"]
ENV PATH=/opt/relay/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# By number, so that a platform sees that it is not root. Nothing is written: the root may be read-only.
USER 10001:10001
# /livez, /readyz and /metrics, for each client that can reach the container.
ENV RELAY_HTTP_LISTEN=0.0.0.0:8080
EXPOSE 8080
# Alive, not ready: while the broker is away the relay waits, and a restart would help nobody.
HEALTHCHECK --interval=10s --timeout=10s --start-period=30s --retries=3 CMD ["relay", "healthcheck"]
ENTRYPOINT ["tini", "--", "relay"]
CMD ["run"]
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="outbox-relay" \
    org.opencontainers.image.description="Transactional outbox relay from PostgreSQL to RabbitMQ" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
