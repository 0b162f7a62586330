#!/bin/sh
# Builds the images: `make images`. With docker, podman or buildah, whichever is found first.
#
#   IMAGES              targets of the Dockerfile, by default all: router cpu cuda
#   IMAGE_PREFIX        of the images' names, such as registry.example.org/team/
#   IMAGE_SOURCE        URL of the source for the images' labels
#   ENGINE              docker, podman or buildah
#   BUILD_FLAGS         further options of the engine's build command, such as --network host
#   PYTHON_IMAGE, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_TRUSTED_HOST, TORCH_INDEX_URL, TORCH_CUDA_INDEX_URL
#                       arguments of the build: the base image, and mirrors of package indexes
set -eu
cd "$(dirname "$0")/../.."

for found in ${ENGINE:-docker podman buildah}; do
    if command -v "$found" >/dev/null; then engine=$found; break; fi
done
case "${engine:-}" in
    docker) build="docker build" ;;
    podman) build="podman build --format docker" ;; # the OCI format has no HEALTHCHECK
    buildah) build="buildah build --format docker --layers" ;; # else each target builds what it shares with others
    *) echo "make images: install docker, podman or buildah, or name one: make images ENGINE=podman" >&2; exit 2 ;;
esac

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' common/__init__.py)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
set -- --build-arg "VERSION=$version" --build-arg "REVISION=$revision" --build-arg "SOURCE=${IMAGE_SOURCE:-unknown}"
for name in PYTHON_IMAGE PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_TRUSTED_HOST TORCH_INDEX_URL TORCH_CUDA_INDEX_URL; do
    if eval "test -n \"\${$name:-}\""; then
        set -- "$@" --build-arg "$name=$(eval "printf %s \"\$$name\"")"
    fi
done

for target in ${IMAGES:-router cpu cuda}; do
    image="${IMAGE_PREFIX:-}baton-$target:$version"
    # shellcheck disable=SC2086  # the words of these are meant to be split
    $build ${BUILD_FLAGS:-} --file deploy/docker/Dockerfile --target "$target" --tag "$image" "$@" .
    echo "built $image"
done
