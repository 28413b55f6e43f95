"""Certificates of a test's own authority, made by `openssl`, and contexts for a TLS proxy."""

import shutil
import ssl
import subprocess

import pytest

_DAYS = "30"


class Authority:
    """Signs a certificate for 127.0.0.1 and one for a client; all are files in a folder."""

    def __init__(self, folder):
        self._openssl = shutil.which("openssl")
        if self._openssl is None:
            pytest.skip("there is no openssl")
        self._folder = folder
        self.ca_file, self._ca_key = self._paths("ca")
        self._run(
            *("req", "-x509", "-subj", "/CN=tests"),
            *("-addext", "basicConstraints=critical,CA:TRUE"),
            *("-addext", "keyUsage=critical,keyCertSign"),
            *("-keyout", self._ca_key, "-out", self.ca_file),
        )
        self.server = self._signed("server", "subjectAltName=IP:127.0.0.1")
        self.client = self._signed("client", "extendedKeyUsage=clientAuth")

    def context(self, *, asks_clients=False):
        """Return what a server needs; on demand it asks clients for a certificate, too."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.ca_file)
        context.load_cert_chain(*self.server)
        if asks_clients:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _paths(self, name):
        return str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key")

    def _signed(self, name, extension):
        certificate, key = self._paths(name)
        self._run(
            *("req", "-x509", "-CA", self.ca_file, "-CAkey", self._ca_key),
            *("-subj", f"/CN={name}", "-addext", extension),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-keyout", key, "-out", certificate),
        )
        return certificate, key

    def _run(self, *arguments):
        new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        subprocess.run(
            [self._openssl, *arguments, *new_key, "-days", _DAYS],
            check=True,
            capture_output=True,
            timeout=60,
        )
