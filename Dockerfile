# Build:  docker build -t oncegate .
# Run:    docker run -p 8080:8080 -v "$PWD/oncegate.toml:/etc/oncegate/oncegate.toml:ro" \
#             -v oncegate:/var/lib/oncegate oncegate
#
# The configuration must listen on 0.0.0.0, since ports are published from outside of loopback.
# Nothing is configured by environment variables here: they would beat your file.

FROM rust:1.95-slim-bookworm AS build
WORKDIR /build
# ring, SQLite and zstd are compiled from C.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY . .
RUN cargo build --release --locked --bin oncegate
# The final image has no shell to make directories with.
RUN mkdir -p /image/var/lib/oncegate

# Debian's C library, the system's root certificates, and no shell. The program links to the C
# library at run time; build and final image are of the same Debian release.
FROM gcr.io/distroless/cc-debian12
COPY --from=build /build/target/release/oncegate /usr/local/bin/oncegate
COPY --from=build /build/LICENSE /usr/share/doc/oncegate/LICENSE
COPY --from=build --chown=65532:65532 /image/var/lib/oncegate /var/lib/oncegate

# Numeric, so that an orchestrator can see that it is not root.
USER 65532:65532
# The SQLite file is the only thing that is ever written; with PostgreSQL nothing is. The root file
# system may be read-only.
WORKDIR /var/lib/oncegate
VOLUME /var/lib/oncegate
EXPOSE 8080 9090
STOPSIGNAL SIGTERM
# Orchestrators ask the admin listener instead: /readyz for traffic, /healthz for life.
HEALTHCHECK --interval=10s --timeout=6s --start-period=20s \
    CMD ["/usr/local/bin/oncegate", "check", "--config", "/etc/oncegate/oncegate.toml", "--ready"]
ENTRYPOINT ["/usr/local/bin/oncegate"]
CMD ["serve", "--config", "/etc/oncegate/oncegate.toml"]
