"""Makes flows/samples/debian_packages.parquet from a Debian package index.

The index comes in on stdin, one stanza a package, with the long English descriptions in it:

    apt-cache -o Acquire::Languages=en show $(python tests/bench/make_sample.py --names) \
        | python tests/bench/make_sample.py flows/samples/debian_packages.parquet

The same index gives the same file: rows are in order of package name, and of several versions of a
package the first in the index counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, takewhile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

NAMES = """
7zip abiword ansible apache2 asciidoc atop audacity autoconf automake autossh awesome babeltrace
backuppc bacula-client balsa bash bc bear bison black bleachbit blender bmon borgbackup brasero
bzip2 calibre ccache cdparanoia certbot check chrony claws-mail cloud-init cmake cmatrix cmus
cockpit collectd coreutils coturn cowsay cppcheck curl dash debootstrap devscripts dia dialog
diffutils digikam docbook docker.io dosfstools dovecot-core dvdauthor e2fsprogs ed elinks emacs
enigma entr evolution exim4 expect feh ffmpeg file filezilla findutils fio fish flake8 flameshot
flatpak flex fluidsynth fontforge foremost fortune-mod fping freecad freeciv freeradius
frozen-bubble galculator ganeti gawk gcompris-qt geany genisoimage getmail6 gettext ghostscript gimp
git git-lfs gitg gnome-boxes gnugo gnumeric gnupg gparted gpsd graphviz gtkwave handbrake hashcat
hdparm hexchat hledger htop httpie hunspell hyperfine i3 iftop imagemagick inkscape inotify-tools
iperf3 ipset iptables irssi jed joe john jupyter-notebook k3b kate kdenlive keepassxc kitty kmail
kodi kstars less lftp libreoffice-writer lighttpd lilypond links2 logrotate logwatch lolcat ltrace
lua5.4 lynx maildrop man-db marble mc mdadm memcached mercurial meson minetest mlocate moreutils
mosh mosquitto mpd mplayer mpv mtr munin mypaint ncdu ncmpcpp ndiff neofetch neomutt netcat-openbsd
newsboat nextcloud-desktop nfs-kernel-server nftables nginx ninja-build nmap nodejs notmuch ntfs-3g
numlockx obs-studio octave offlineimap3 okular openssh-server optipng pandoc parallel parted patch
pcmanfm pgbouncer php pinfo pipewire pitivi pngcrush podman poppler-utils postfix postgresql
powertop prometheus psmisc pulseaudio puppet-agent pv pylint qemu-system qgis qmmp r-base
rawtherapee recoll redis remmina restic retroarch ripgrep rkhunter rsnapshot rspamd rsync rsyslog
ruby rustc sbcl scons screen scribus sed shotwell simple-scan smartmontools smplayer socat sox
spamassassin speedtest-cli sqlite3 squid stellarium stow strace stunnel4 subversion sudo surfraw
swaks sway sylpheed sysstat taskwarrior tcpdump telegram-desktop thunderbird tig tilix timeshift
tmux toilet tor traceroute transmission-gtk trickle tuxmath tuxpaint ufw unbound unison unzip uwsgi
valgrind varnish vifm vim vlc weechat-core wesnoth wget whois wine wireguard wireshark xfig xfsprogs
xmoto xz-utils yt-dlp zathura zbar-tools zip znc zsh zstd zynaddsubfx
""".split()

SCHEMA = pa.schema(
    [("package", pa.string()), ("section", pa.string()), ("description", pa.string())],
)


def stanzas(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """The fields of each package; a field of several lines keeps its line ends and indents."""
    source = iter(lines)
    for first in source:
        fields: dict[str, str] = {}
        name = ""
        for line in chain([first], takewhile(str.strip, source)):
            if line[0].isspace():
                fields[name] += "\n" + line.rstrip()
            elif ":" in line:
                name, _, value = line.partition(":")
                fields[name] = value.strip()
        yield fields


def long_description(field: str) -> str:
    """The paragraphs of a Description field without its synopsis, wrapped lines joined.

    Debian policy 5.6.13: one leading space is text to be wrapped, two are to be shown as they
    are, and a lone full stop is an empty line.
    """
    paragraphs: list[str] = [""]
    for line in field.split("\n")[1:]:
        text = line[1:]
        if text.strip() == ".":
            paragraphs.append("")
        elif text.startswith(" "):
            paragraphs[-1] = f"{paragraphs[-1]}\n{text.strip()}".lstrip("\n")
        else:
            paragraphs[-1] = f"{paragraphs[-1]} {text.strip()}".lstrip(" ")
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def rows(packages: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """One row for each package of NAMES that the index knows, in order of name."""
    wanted = set(NAMES)
    found: dict[str, dict[str, str]] = {}
    for fields in packages:
        name = fields.get("Package", "")
        text = long_description(fields.get("Description-en", ""))
        if name in wanted and name not in found and text:
            section = fields.get("Section", "")
            found[name] = {"package": name, "section": section, "description": text}
    return [found[name] for name in sorted(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--names", action="store_true", help="print the packages to ask apt for")
    arguments = parser.parse_args()
    if arguments.names:
        print(*NAMES)
        return
    if arguments.output is None:
        parser.error("say where the Parquet file goes, or --names")
    table = pa.Table.from_pylist(rows(stanzas(sys.stdin)), schema=SCHEMA)
    if missing := set(NAMES) - set(table["package"].to_pylist()):
        parser.error(f"the index has no long English description of {sorted(missing)}")
    pq.write_table(table, arguments.output, compression="zstd", row_group_size=100)
    print(f"{arguments.output}: {table.num_rows} rows, {arguments.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
