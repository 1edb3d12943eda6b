"""A private nginx."""

from pathlib import Path

from tests.support.front_proxy import FrontProxy

PROGRAM = Path("/usr/sbin/nginx")  # no user but root has its folder in PATH

MAIN = """
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{server}
}}
"""


class Nginx(FrontProxy):
    NAME, CONFIGURATION = "nginx", "nginx.conf"

    @classmethod
    def is_installed(cls) -> bool:
        return PROGRAM.exists()

    def _command(self, folder: Path) -> list[str | Path]:
        return [PROGRAM, "-p", folder, "-c", folder / self.CONFIGURATION]

    def _whole(self, site: str, folder: Path) -> str:
        return MAIN.format(folder=folder, server=site)
