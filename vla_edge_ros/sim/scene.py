"""
The simulated work cell as one MJCF string, built from primitives.

A gantry robot over a table: a bridge rides along y on two rails, a trolley rides along x on
the bridge and carries a mast whose tip hovers above four coloured cubes. The bridge spans the
camera's horizontal axis, so that from the front it can never cover what lies under the tip,
and it is thinner in the image than a cube.
"""

WORKSPACE_X = 0.30
"""Reach of the tip to either side of the table's centre, m."""
WORKSPACE_Y = 0.25
"""Reach of the tip towards and away from the camera, m."""
OBJECT_SIZE = 0.04
"""Edge of a cube, m."""
TIP_HEIGHT = 0.05
"""Height of the tool tip above the table, m: clear of the cubes."""
SPEED_LIMIT = 1.0
"""Largest commanded speed of each axis, m/s."""
COLOURS = {
    'red': (0.86, 0.12, 0.10),
    'green': (0.12, 0.62, 0.20),
    'blue': (0.10, 0.28, 0.88),
    'yellow': (0.97, 0.80, 0.08),
}
"""Names and colours of the cubes, in the order of the world's object arrays."""

TIME_CONSTANT_S = 0.03
TROLLEY_KG = 1.0
BRIDGE_KG = 2.0
BRIDGE_HEIGHT = 0.20
RAIL_X = 0.38
RAIL_HALF_LENGTH = 0.34


def _objects() -> str:
    half = OBJECT_SIZE / 2
    return '\n'.join(
        f'<body name="{name}" mocap="true" pos="0 0 {half}">'
        f'<geom type="box" size="{half} {half} {half}" material="{name}"/></body>'
        for name in COLOURS
    )


def _object_materials() -> str:
    return '\n'.join(
        f'<material name="{name}" rgba="{red} {green} {blue} 1" specular="0.2"/>'
        for name, (red, green, blue) in COLOURS.items()
    )


def _rails() -> str:
    geoms = []
    for x in (-RAIL_X, RAIL_X):
        z = BRIDGE_HEIGHT - 0.022
        geoms.append(
            f'<geom type="box" size="0.012 {RAIL_HALF_LENGTH} 0.010" pos="{x} 0 {z}"'
            ' material="aluminium"/>'
        )
        for y in (-RAIL_HALF_LENGTH + 0.02, RAIL_HALF_LENGTH - 0.02):
            geoms.append(
                f'<geom type="box" size="0.014 0.014 {z / 2}" pos="{x} {y} {z / 2}"'
                ' material="graphite"/>'
            )
    return '\n'.join(geoms)


def _legs() -> str:
    return '\n'.join(
        f'<geom type="cylinder" size="0.02 0.22" pos="{x} {y} -0.26" material="graphite"/>'
        for x in (-0.38, 0.38)
        for y in (-0.32, 0.32)
    )


def _gantry() -> str:
    mast_half = (BRIDGE_HEIGHT - TIP_HEIGHT - 0.02) / 2
    mast_z = TIP_HEIGHT + 0.02 + mast_half - BRIDGE_HEIGHT
    tip_z = TIP_HEIGHT - BRIDGE_HEIGHT
    return f"""
    <body name="bridge" pos="0 0 {BRIDGE_HEIGHT}">
      <inertial pos="0 0 0" mass="{BRIDGE_KG}" diaginertia="0.1 0.1 0.1"/>
      <joint name="bridge" axis="0 1 0" range="{-WORKSPACE_Y} {WORKSPACE_Y}"/>
      <geom type="box" size="{RAIL_X + 0.015} 0.008 0.008" material="aluminium"/>
      <geom type="box" size="0.022 0.035 0.014" pos="{-RAIL_X} 0 0.002" material="violet"/>
      <geom type="box" size="0.022 0.035 0.014" pos="{RAIL_X} 0 0.002" material="violet"/>
      <body name="trolley">
        <inertial pos="0 0 0" mass="{TROLLEY_KG}" diaginertia="0.1 0.1 0.1"/>
        <joint name="trolley" axis="1 0 0" range="{-WORKSPACE_X} {WORKSPACE_X}"/>
        <geom type="box" size="0.022 0.016 0.014" material="graphite"/>
        <geom type="box" size="0.014 0.012 0.012" pos="0 0 0.024" material="violet"/>
        <geom type="cylinder" size="0.005 {mast_half}" pos="0 0 {mast_z}"
              material="aluminium"/>
        <geom type="cylinder" size="0.008 0.007" pos="0 0 {tip_z + 0.016}"
              material="graphite"/>
        <geom type="sphere" size="0.011" pos="0 0 {tip_z}" material="tip"/>
        <site name="tip" pos="0 0 {tip_z}" size="0.001" group="5"/>
      </body>
    </body>"""


def build_scene(props: str = '') -> str:
    """
    Return the MJCF of the work cell; ``props`` are further elements of its world.

    Each axis is a velocity servo whose gain is moving mass / time constant; nothing collides
    and nothing falls, since the cubes are moved by :class:`~vla_edge_ros.sim.world.World`.
    """
    speed = f'ctrlrange="{-SPEED_LIMIT} {SPEED_LIMIT}"'
    return f"""
<mujoco model="vla_edge_gantry">
  <compiler angle="degree" autolimits="true"/>
  <option timestep="0.002" gravity="0 0 0" integrator="implicitfast">
    <flag contact="disable"/>
  </option>
  <visual>
    <global offwidth="640" offheight="480"/>
    <quality numslices="12" numstacks="6" numquads="2"/>
    <headlight ambient="0.40 0.40 0.40" diffuse="0.14 0.14 0.14" specular="0 0 0"/>
    <map znear="0.02" zfar="20"/>
  </visual>
  <statistic extent="1" center="0 0 0.1"/>
  <default>
    <joint type="slide" solreflimit="0.004 1"/>
  </default>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1="0.62 0.75 0.88"
             rgb2="0.17 0.23 0.33" width="128" height="128"/>
    <texture name="tiles" type="2d" builtin="checker" rgb1="0.29 0.32 0.36"
             rgb2="0.25 0.28 0.32" width="128" height="128"/>
    <material name="floor" texture="tiles" texrepeat="20 20" specular="0"/>
    <material name="table" rgba="0.80 0.76 0.70 1" specular="0.1"/>
    <material name="mat" rgba="0.90 0.89 0.86 1" specular="0"/>
    <material name="border" rgba="0.55 0.57 0.60 1" specular="0"/>
    <material name="aluminium" rgba="0.70 0.72 0.75 1" specular="0.6" shininess="0.6"/>
    <material name="graphite" rgba="0.16 0.17 0.19 1" specular="0.3"/>
    <material name="violet" rgba="0.40 0.25 0.55 1" specular="0.3"/>
    <material name="tip" rgba="0.95 0.20 0.85 1" emission="0.4"/>
    {_object_materials()}
  </asset>
  <worldbody>
    <light name="lamp" pos="0.3 -0.5 1.6" dir="-0.18 0.3 -0.95" diffuse="0.50 0.50 0.48"
           specular="0.20 0.20 0.20" castshadow="false"/>
    <camera name="policy" pos="0 -0.56 0.86" xyaxes="1 0 0 0 0.86 0.53" fovy="36.5"/>
    <camera name="video" pos="0.68 -0.98 0.86" xyaxes="0.822 0.570 -0.000 -0.341 0.491 0.801"
            fovy="40"/>
    <geom type="box" size="8 8 0.01" pos="0 0 -0.49" material="floor"/>
    <geom type="box" size="0.43 0.38 0.02" pos="0 0 -0.02" material="table"/>
    <geom type="box" size="0.335 0.285 0.0008" pos="0 0 0" material="border"/>
    <geom type="box" size="0.33 0.28 0.001" pos="0 0 0" material="mat"/>
    {_legs()}
    {_rails()}
    {_gantry()}
    {_objects()}{props}
  </worldbody>
  <actuator>
    <velocity joint="trolley" kv="{TROLLEY_KG / TIME_CONSTANT_S}" {speed}/>
    <velocity joint="bridge" kv="{(TROLLEY_KG + BRIDGE_KG) / TIME_CONSTANT_S}" {speed}/>
  </actuator>
</mujoco>
"""
