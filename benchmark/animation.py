"""A short GIF of a trained agent, for the README: film it with --evaluate and --capture-video, then

python benchmark/animation.py runs/RUN/video-…/rl-video-episode-0.mp4 halfcheetah.gif
"""

from dataclasses import dataclass

import imageio.v2 as imageio
import tyro
from PIL import Image


@dataclass
class Args:
    film: tyro.conf.Positional[str]  # an mp4
    gif: tyro.conf.Positional[str]  # what to write
    start: float = 2.0  # seconds into the film
    seconds: float = 4.0  # of the film
    fps: int = 25  # pictures per second, about
    width: int = 240  # pixels
    sky: float = 0.35  # the part of the picture, from the top, to leave out


def main():
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    reader = imageio.get_reader(args.film)
    fps = reader.get_meta_data()["fps"]
    first, last = round(args.start * fps), round((args.start + args.seconds) * fps)
    every = max(1, round(fps / args.fps))
    shown = range(first, last, every)
    frames = [Image.fromarray(frame) for i, frame in enumerate(reader) if i in shown]
    frames = [frame.crop((0, round(args.sky * frame.height), *frame.size)) for frame in frames]
    size = (args.width, round(args.width * frames[0].height / frames[0].width))
    frames = [frame.resize(size).quantize(64) for frame in frames]
    options = {"duration": 1000 * every / fps, "loop": 0, "optimize": True}
    frames[0].save(args.gif, save_all=True, append_images=frames[1:], **options)


if __name__ == "__main__":
    main()
